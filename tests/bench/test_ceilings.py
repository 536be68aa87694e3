import pytest

from perilune.bench import ceilings as ceilings_module
from perilune.bench.ceilings import Work, measure_ceilings


def test_reads_count_by_the_median_of_the_best_number_of_streams(ceilings):
    assert ceilings.read == 1e10


def test_products_without_an_instruction_are_bound_by_float32(ceilings):
    assert [ceilings.flops(products) for products in ("float32", "bfloat16", "int8")] == [2e11, 2e11, 4e11]


def test_work_takes_at_least_what_each_bound_allows(ceilings):
    assert Work(2e10, 1e11).ideal_s(ceilings) == {"memory": 2.0, "arithmetic": 0.5}
    assert Work(0, 8e11, "int8").ideal_s(ceilings) == {"memory": 0.0, "arithmetic": 2.0}


def test_this_machine_has_ceilings(native_core, monkeypatch):
    monkeypatch.setattr(ceilings_module, "READ_BYTES", 64 << 20)
    monkeypatch.setattr(ceilings_module, "_DOT_S", 0.02)
    found = measure_ceilings()
    assert (found.isa, found.num_threads) == (native_core.isa(), native_core.num_threads())
    assert found.float32_flops > 1e8
    assert found.read > 1e7
    again = found.with_read_measured_again()
    assert len(again.read_by_streams) == 1
    assert set(again.read_by_streams) <= set(found.read_by_streams)
    assert str(found.num_threads) in str(found)
    assert found.as_json()["read"] == found.read


def test_each_instruction_set_has_float32_products_and_no_rate_is_negative(native_core):
    before = native_core.isa()
    try:
        for isa in native_core.available_isas():
            native_core.use_isa(isa)
            rates = [native_core.dot_rate(code, 0.01) for code in (0, 1, 2)]
            assert rates[0] > 0
            assert min(rates) >= 0
    finally:
        native_core.use_isa(before)


def test_too_little_memory_to_read_is_an_error(native_core):
    with pytest.raises(MemoryError):
        native_core.read_rates(1, 1, 1)
