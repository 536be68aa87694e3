"""The floors and walls of the package as law: who may import whom, which words stay where, how large things grow."""

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "perilune"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TRAINING = sorted((ROOT / "train").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FLOORS = {
    "_native": 0,
    **dict.fromkeys(["errors", "env", "platform", "config"], 1),
    "ops": 2,
    **dict.fromkeys(["cache", "checkpoint", "parallel"], 3),
    "models": 4,
    **dict.fromkeys(["sampling", "speculative", "text", "grammar"], 5),
    "engine": 6,
    **dict.fromkeys(["server", "verify", "bench", "planner"], 7),
    **dict.fromkeys(["cli", "train"], 8),
}
# On the lowest floor everything may name an error; elsewhere a sideways import is one of these.
SIDEWAYS = {("env", "errors"), ("platform", "errors"), ("config", "errors"), ("checkpoint", "parallel")}
SIDEWAYS |= {("speculative", "sampling"), ("grammar", "text")}

# What the server may know of the engine: the client and the messages that cross it.
SERVER_MAY_USE = ("engine.client", "engine.request", "engine.stats", "sampling.params", "sampling.logprobs")
SERVER_MAY_USE += ("grammar.answer", "grammar.spec", "text", "errors", "env", "config", "server")
OPS_MAY_USE = ("ops", "errors", "platform", "env", "_native")
PLANNER_MAY_USE = ("planner", "config", "models.accounting", "cache.spec", "checkpoint.names", "errors", "platform")
PLANNER_MAY_USE += ("parallel.mesh", "parallel.placement")
MODELS_MAY_NOT_USE = ("env", "config.engine", "platform")

TORCH_FREE = [
    *["errors", "env", "platform", "config"],
    *[
        "cache.spec",
        "cache.pool",
        "cache.manager",
        "cache.tiers",
        "models.accounting",
        "parallel.mesh",
        "parallel.placement",
        "sampling.params",
        "sampling.logprobs",
        "text",
        "grammar",
    ],
    *[
        "engine.scheduler",
        "engine.request",
        "engine.batch",
        "engine.stats",
        "engine.client",
        "engine.fake",
        "server",
        "planner",
    ],
]

MODEL_WORDS = re.compile(r"(?<![a-z])(kda|mla|dsa|moe)(?![a-z])|indexer(?!ror)", re.IGNORECASE)
HARDWARE_WORDS = re.compile(r"cuda|triton|avx|rocm|(?<![a-z0-9_])sm_", re.IGNORECASE)
HARDWARE_PLACES = ("ops", "platform")
BANNED_NAMES = {"utils", "common", "helpers", "misc"}


def module_of(path: Path) -> str:
    """Dotted name below `perilune`; the root's own files are "" and "__main__", the trainer's start with `train`."""
    base = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
    parts = list(path.relative_to(base).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_below(module: str, names: tuple[str, ...] | list[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Every imported dotted name; `from a import b` gives "a.b". Imports inside functions count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(source: str) -> list[str]:
    """Imports of perilune's own modules, without the leading `perilune.`."""
    names = imports_of(ast.parse(source))
    return [name.removeprefix("perilune.") for name in names if name.startswith("perilune.")]


def floor_violations(module: str, source: str) -> list[str]:
    """Imports of `module` that do not go down, or cross a wall."""
    top = module.split(".")[0]
    found = []
    for target in own_imports(source):
        other = target.split(".")[0]
        if other not in FLOORS:
            reason = None if top in ("cli", "train") else "only the top floor may import the package's root"
        elif other == "_native" and module != "ops._native":
            reason = "the compiled core is reached through ops._native only"
        elif other != top and FLOORS[other] >= FLOORS.get(top, 9) and (top, other) not in SIDEWAYS:
            reason = "imports go down only"
        elif top == "server" and not is_below(target, SERVER_MAY_USE):
            reason = "the server reaches the engine through its client only"
        elif top == "ops" and not is_below(target, OPS_MAY_USE):
            reason = "ops take tensors and numbers only"
        elif top == "planner" and not is_below(target, PLANNER_MAY_USE):
            reason = "the planner is arithmetic over the configuration"
        elif top == "models" and is_below(target, MODELS_MAY_NOT_USE):
            reason = "models read no environment and no engine settings"
        elif top == "text" and other != "text" and not is_below(target, TORCH_FREE):
            reason = "text uses only what is free of torch"
        else:
            reason = None
        if reason is not None:
            found.append(f"{module} imports {target}: {reason}")
    return found


def foreign_imports(source: str, name: str) -> list[str]:
    return [found for found in imports_of(ast.parse(source)) if is_below(found, [name])]


def environment_reads(source: str) -> list[int]:
    """Lines that touch the process environment."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            lines += [node.lineno] if node.attr in names else []
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return lines


def long_functions(source: str, limit: int) -> list[str]:
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    sizes = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    return [f"{name} has {size} lines" for name, size in sizes if size > limit]


def words_found(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def sources_below(*names: str) -> list[Path]:
    return [path for path in SOURCES if is_below(module_of(path), names)]


def test_every_package_has_a_floor():
    tops = {module_of(path).split(".")[0] for path in SOURCES} - {"", "__main__"}
    assert tops <= set(FLOORS)


def test_imports_go_down_and_cross_no_wall():
    paths = [path for path in SOURCES + TRAINING if module_of(path) not in ("", "__main__")]
    assert [line for path in paths for line in floor_violations(module_of(path), path.read_text())] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cache.pool", "from perilune.models.model import KimiModel"),
        ("ops.kda", "from perilune.config.model import ModelConfig"),
        ("models.kda", "def f():\n    from perilune.config.engine import EngineConfig"),
        ("models.kda", "import perilune.env"),
        ("ops.kda.native", "from perilune import _native"),
        ("server.app", "from perilune.engine.core import EngineCore"),
        ("server.app", "from perilune.engine import core"),
        ("server.app", "from perilune.models.model import KimiModel"),
        ("text.stream", "from perilune.sampling.sampler import Sampler"),
        ("text.stream", "from perilune.cache.storage import CacheStorage"),
        ("planner.search", "from perilune.models.model import KimiModel"),
        ("verify.logits", "from perilune.server.app import create_app"),
        ("engine.core", "from perilune import LLM"),
        ("engine.core", "from perilune.cli.main import main"),
        ("env", "from perilune.platform import num_cpus"),
    ],
)
def test_the_floor_check_catches(module, source):
    assert len(floor_violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("server.app", "from perilune.engine.client import EngineClient\nfrom perilune.text.stop import StopMatcher"),
        ("speculative.verify", "from perilune.sampling.sampler import Sampler"),
        ("models.kda", "from perilune import ops"),
        ("cli.serve", "from perilune.engine.build import build_engine"),
        ("train.run", "from perilune import LLM"),
        ("config.parse", "from perilune.errors import ConfigError"),
    ],
)
def test_the_floor_check_allows(module, source):
    assert floor_violations(module, source) == []


def test_package_init_files_are_empty_but_for_ops_and_the_root():
    allowed = [PACKAGE / "__init__.py", *sources_below("ops")]
    inits = [path for path in SOURCES if path.name == "__init__.py" and path not in allowed]
    assert [str(path) for path in inits if ast.parse(path.read_text()).body] == []


def test_engine_cache_and_server_know_no_part_of_the_model_by_name():
    assert words_found(MODEL_WORDS, sources_below("engine", "cache", "server")) == []


def test_hardware_is_named_in_its_places_only():
    paths = [path for path in SOURCES if not is_below(module_of(path), HARDWARE_PLACES)]
    assert words_found(HARDWARE_WORDS, paths) == []


@pytest.mark.parametrize("text", ["kda_state", "MLA", "moe2", "the dsa", "indexers", "num_moe"])
def test_a_model_word_is_found(text):
    assert MODEL_WORDS.search(text)


@pytest.mark.parametrize("text", ["use_cuda", "sm_90", "Triton", "avx512"])
def test_a_hardware_word_is_found(text):
    assert HARDWARE_WORDS.search(text)


def test_other_words_are_spared():
    assert MODEL_WORDS.search("index moex demoe lambda emla") is None
    assert HARDWARE_WORDS.search("transform_ prism_1 small") is None


def test_the_environment_is_read_in_one_file():
    paths = [path for path in SOURCES + TRAINING if module_of(path) != "env"]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in environment_reads(path.read_text())] == []
    assert environment_reads("import os\nos.environ['A']\nos.getenv('B')") == [2, 3]
    assert environment_reads("from os import environ") == [1]


def test_compiled_code_is_imported_in_one_place_each():
    homes = {"triton": "ops._triton", "perilune._native": "ops._native"}
    for name, home in homes.items():
        users = [module_of(path) for path in SOURCES if foreign_imports(path.read_text(), name)]
        assert set(users) <= {home}


def test_modules_that_must_be_free_of_torch_never_name_it():
    for name in TORCH_FREE:
        assert sources_below(name), f"{name} is listed as free of torch and does not exist"
    users = [path for path in sources_below(*TORCH_FREE) if foreign_imports(path.read_text(), "torch")]
    assert users == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_modules_that_must_be_free_of_torch_import_without_it():
    names = [f"perilune.{module_of(path)}" for path in sources_below(*TORCH_FREE, "cli")]
    code = "import sys, importlib\nsys.modules['torch'] = None\n"
    code += f"for name in {names!r}:\n    importlib.import_module(name)"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["perilune", "perilune.cli.main"])
def test_importing_a_leaf_never_imports_torch(module):
    result = run_python(f"import sys, {module}\nassert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_files_and_functions_stay_small():
    for path in SOURCES + TRAINING + TESTS:
        source = path.read_text()
        num_lines = len(source.splitlines())
        assert num_lines <= 600, f"{path} has {num_lines} lines; split it by noun"
        assert long_functions(source, 80) == [], path
        if num_lines > 400:
            warnings.warn(f"{path.relative_to(ROOT)} has {num_lines} lines; split it before 600", stacklevel=1)
    assert long_functions("def f():\n    a = 1\n    return a", 2) == ["f has 3 lines"]


def test_packages_stay_small_and_files_are_named_by_noun():
    for directory in {path.parent for path in SOURCES}:
        files = [path for path in directory.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 12, f"{directory} has {len(files)} files"
    assert [path for path in SOURCES + TRAINING if path.stem in BANNED_NAMES] == []


def test_tests_mirror_the_package():
    tested = [path.relative_to(ROOT / "tests") for path in TESTS if path.name.startswith("test_")]
    folders = {path.parts[0] for path in tested if len(path.parts) > 1}
    assert folders <= {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"train"}
