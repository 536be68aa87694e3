import subprocess
import sys

import pytest
import torch

from perilune import ops
from perilune.errors import BackendError
from perilune.ops import registry
from perilune.ops.registry import Candidate, Op, all_ops, apply_overrides, tensor_key


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test declares is gone afterwards."""
    ops.load_all()
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))


@pytest.fixture
def double():
    return Op("double", lambda x: ("reference", 2 * x), key=lambda x: tensor_key(x, sizes=x.shape[-1:]))


def refuse_odd(key):
    return f"width {key.sizes[0]} is odd" if key.sizes[0] % 2 else None


def key_of(width, **options):
    return tensor_key(torch.zeros(3, width), sizes=(width,), **options)


def test_the_first_willing_backend_in_order_serves(double):
    double.register("native", lambda x: ("native", 2 * x), lambda key: None)
    assert double(torch.ones(2))[0] == "native"
    double.register("triton", lambda x: ("triton", 2 * x), lambda key: None)
    assert double(torch.ones(2))[0] == "triton"


def test_a_refusal_leaves_the_call_to_the_next_backend(double):
    double.register("native", lambda x: ("native", 2 * x), refuse_odd)
    assert double(torch.ones(4))[0] == "native"
    assert double(torch.ones(5))[0] == "reference"


def test_explain_gives_every_candidate_with_its_reason(double):
    double.register("native", lambda x: ("native", 2 * x), refuse_odd)
    assert double.explain(key_of(5)) == [
        Candidate("native", "width 5 is odd", is_chosen=False),
        Candidate("reference", None, is_chosen=True),
    ]
    assert [candidate.is_chosen for candidate in double.explain(key_of(4))] == [True, False]


def test_the_choice_is_made_once_per_key(double):
    asked = []
    double.register("native", lambda x: ("native", 2 * x), lambda key: asked.append(key))
    for x in (torch.ones(4), torch.ones(9, 4), torch.ones(4), torch.ones(4).double(), torch.ones(6)):
        double(x)
    assert [(key.sizes, key.dtypes) for key in asked] == [
        ((4,), (torch.float32,)),
        ((4,), (torch.float64,)),
        ((6,), (torch.float32,)),
    ]


def test_the_need_of_a_gradient_is_part_of_the_key(double):
    double.register("native", lambda x: ("native", 2 * x), lambda key: "no gradient" if key.needs_grad else None)
    weight = torch.ones(4, requires_grad=True)
    assert double(weight)[0] == "reference"
    with torch.no_grad():
        assert double(weight)[0] == "native"


def test_an_absent_tensor_is_left_out_of_the_key():
    x = torch.zeros(2)
    assert tensor_key(x, None) == tensor_key(x)
    assert tensor_key(x, x) != tensor_key(x)


def test_an_override_serves_also_keys_seen_before(double):
    double.register("native", lambda x: ("native", 2 * x), lambda key: None)
    assert double(torch.ones(4))[0] == "native"
    apply_overrides({"double": "reference"})
    assert double(torch.ones(4))[0] == "reference"
    assert double.explain(key_of(4))[0].refusal == "the configuration names reference"


def test_the_next_configuration_lifts_an_override(double):
    double.register("native", lambda x: ("native", 2 * x), lambda key: None)
    apply_overrides({"double": "reference"})
    apply_overrides({})
    assert double(torch.ones(4))[0] == "native"


def test_a_forced_backend_that_refuses_is_an_error_with_all_reasons(double):
    double.register("native", lambda x: ("native", 2 * x), refuse_odd)
    double.force("native")
    message = "op double .* native: width 5 is odd; reference: the configuration names native"
    with pytest.raises(BackendError, match=message):
        double(torch.ones(5))


def test_an_unknown_op_is_refused_before_any_override_holds(double):
    double.register("native", lambda x: ("native", 2 * x), lambda key: None)
    with pytest.raises(BackendError, match=r"unknown op 'kda_chonk' .* kda_chunk"):
        apply_overrides({"double": "reference", "kda_chonk": "reference"})
    assert double(torch.ones(4))[0] == "native"


def test_an_unknown_backend_is_refused_with_those_there_are():
    with pytest.raises(BackendError, match="op rms_norm has no 'cuda' implementation; choose one of reference"):
        apply_overrides({"rms_norm": "cuda"})


def test_an_override_finds_ops_that_nobody_has_imported_yet():
    code = "from perilune.ops.registry import apply_overrides\napply_overrides({'kda_chunk': 'reference'})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_backend_must_be_known_and_registers_once(double):
    double.register("native", lambda x: ("native", x), lambda key: None)
    for backend in ("native", "fast"):
        with pytest.raises(AssertionError, match=backend):
            double.register(backend, lambda x: ("?", x), lambda key: None)


def test_an_op_is_declared_once(double):
    with pytest.raises(AssertionError, match="double"):
        Op("double", double.reference, key=tensor_key)


def test_every_public_op_is_declared_under_its_own_name():
    assert set(ops.__all__) == set(all_ops())
    assert all(getattr(ops, name) is op for name, op in all_ops().items())


def test_an_unknown_public_op_is_named_with_those_there_are():
    with pytest.raises(AttributeError, match=r"no op 'kda_fast'; known: .*kda_chunk"):
        ops.kda_fast  # noqa: B018
