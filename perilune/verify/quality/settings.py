"""The settings in which quality is measured: how the server is started and how it is asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import ConfigError

# Against it every other setting is judged: bfloat16, nothing cached, one request at a time.
BASELINE = "bf16, batch 1"


@dataclass(frozen=True)
class Setting:
    """Options of `perilune serve`, and how its clients ask.

    With `is_asked_twice` the second answers count, which go on from what the first ones left in the cache.
    """

    name: str
    options: tuple[str, ...] = ()
    concurrency: int = 8
    is_streamed: bool = False
    is_asked_twice: bool = False
    effort: str = "none"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options with those that every setting has unless it says otherwise."""
        given = ["--max-num-seqs", str(self.concurrency)]
        if "--dtype" not in self.options:
            given += ["--dtype", "bfloat16"]
        if not self.is_asked_twice:
            given.append("--no-prefix-cache")
        return (*given, *self.options)


SETTINGS = (
    Setting(BASELINE, concurrency=1),
    Setting("batch 32", concurrency=32),
    Setting("float32", ("--dtype", "float32")),
    Setting("dense int8", ("--dense-weights", "int8")),
    Setting("dense fp8", ("--dense-weights", "fp8")),
    Setting("activations int8", ("--activations", "int8")),
    Setting("dense and activations int8", ("--dense-weights", "int8", "--activations", "int8")),
    Setting("cache fp8", ("--cache-dtype", "fp8")),
    Setting("cache int8", ("--cache-dtype", "int8")),
    Setting("index cache fp8", ("--index-cache-dtype", "fp8")),
    Setting("index cache int8", ("--index-cache-dtype", "int8")),
    Setting("index cache mxfp4", ("--index-cache-dtype", "mxfp4")),
    Setting("prefix cache", is_asked_twice=True),
    Setting("speculative ngram", ("--speculative", "ngram")),
    Setting("speculative dspark", ("--speculative", "dspark")),
    Setting("streaming", is_streamed=True),
    Setting("thinking low", effort="low"),
)


def chosen_settings(names: Sequence[str], checkpoint: Path) -> list[Setting]:
    """The settings of these names, or all that the checkpoint allows; the baseline is always the first."""
    known = {setting.name: setting for setting in SETTINGS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--setting is {unknown[0]!r}; allowed are {'; '.join(known)}")
    if names:
        return [known[name] for name in known if name in (BASELINE, *names)]
    has_draft = (checkpoint / "draft" / "config.json").exists()
    return [setting for setting in SETTINGS if has_draft or "dspark" not in setting.options]
