"""Runs llama.cpp's own converter on a checkpoint that has no tokenizer.

Started as a program of its own, with the folder of llama.cpp first and the converter's arguments after it. Two things
are set aside: the vocabulary, and the transformers package, which the converter asks only for the configuration and
can do without.
"""

import runpy
import sys
import types
from pathlib import Path
from typing import Any


class NoConfig:
    """Stands where transformers' AutoConfig is; the converter then reads config.json itself."""

    @staticmethod
    def from_pretrained(*_: object, **__: object) -> object:
        raise ValueError("transformers is left out")


def main() -> None:
    """Convert as `convert_hf_to_gguf.py` does, with the vocabulary set to none."""
    folder = Path(sys.argv[1]).resolve()
    transformers: Any = types.ModuleType("transformers")
    transformers.AutoConfig = NoConfig
    sys.modules["transformers"] = transformers
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    conversion: Any = __import__("conversion")
    model: Any = conversion.get_model_class("KimiK3ForConditionalGeneration")
    model.set_vocab = lambda self: self._set_vocab_none()
    program = str(folder / "convert_hf_to_gguf.py")
    sys.argv = [program, *sys.argv[2:]]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
