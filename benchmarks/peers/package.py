"""Fetches llama.cpp from the package registry and builds it for this machine."""

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.3.36"
TARGETS = ("llama-bench", "llama-quantize", "test-backend-ops")
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
NATIVE = Path(__file__).parent / "native"


@dataclass(frozen=True)
class WorkDir:
    """The folder that holds everything fetched, built and converted."""

    root: Path

    @property
    def tree(self) -> Path:
        return self.root / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"

    @property
    def bin(self) -> Path:
        return self.tree / "build" / "bin"

    @property
    def probe(self) -> Path:
        return self.root / "read_probe"

    @property
    def ops(self) -> Path:
        return self.root / "ops"

    @property
    def steps(self) -> Path:
        return self.root / "llama_steps"

    def gguf(self, checkpoint: Path, dense: str) -> Path:
        """The converted file, with `dense` weights bf16 or q8."""
        return self.root / "models" / f"{checkpoint.resolve().name}-{dense}.gguf"


def build(work: WorkDir, jobs: int) -> None:
    """Download, unpack and build what is not there yet; about 12 minutes on two cores."""
    work.root.mkdir(parents=True, exist_ok=True)
    if not work.tree.is_dir():
        _fetch(work)
    _run("cmake", "-S", str(work.tree), "-B", str(work.tree / "build"), "-G", "Ninja", *CMAKE_OPTIONS)
    _run("ninja", f"-j{jobs}", "-C", str(work.tree / "build"), *TARGETS)
    flags = ("-O3", "-march=native", "-std=c++17", "-pthread", "-Wall", "-Wextra")
    headers = [f"-I{work.tree / folder}" for folder in ("include", "ggml/include")]
    libraries = ("-lllama", "-lggml", "-lggml-cpu", "-lggml-base", f"-L{work.bin}", f"-Wl,-rpath,{work.bin}")
    _run("g++", *flags, str(NATIVE / "read_probe.cpp"), "-o", str(work.probe))
    for program in (work.ops, work.steps):
        _run("g++", *flags, *headers, str(NATIVE / f"{program.name}.cpp"), "-o", str(program), *libraries)


def _fetch(work: WorkDir) -> None:
    name = "llama-cpp-python"
    folder = work.root / "sdist"
    _run(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, f"{name}=={VERSION}", "-d", folder)
    (archive,) = folder.glob(f"*{VERSION}.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work.root, filter="data")


def _run(*arguments: str | os.PathLike[str]) -> None:
    print("+", *arguments, file=sys.stderr, flush=True)
    subprocess.run(arguments, check=True, stdout=sys.stderr)
