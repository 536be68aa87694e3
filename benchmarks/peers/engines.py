"""The command lines of both engines: what is run for each figure. Change them here."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """One command line, and where its output holds the figures.

    `figures` maps a figure's name to a key of the last JSON object printed, or to FIRST_OUTPUT. The names in braces
    are filled in: the paths and {threads} by the runner, the others from the variant's `options`. `peak_bytes` is the
    key of the engine's own peak memory, where the process holds more than the engine; else the process's counts.
    """

    line: str
    figures: dict[str, str]
    peak_bytes: str | None = None


@dataclass(frozen=True)
class Job:
    """What both engines do side by side."""

    name: str
    llama: tuple[Command, ...]
    perilune: tuple[Command, ...]
    # a busy process on the last core meanwhile
    has_neighbour: bool = False
    # at most so many repetitions, for what takes minutes
    most_repetitions: int | None = None


@dataclass(frozen=True)
class Variant:
    """An engine with its settings; `options` fills in the names in braces of the command lines."""

    engine: str
    options: dict[str, str] = field(default_factory=dict)


# instead of a JSON key: seconds from the start of the process to its first line on stdout
FIRST_OUTPUT = "first output"

LLAMA_BENCH = "{bin}/llama-bench -m {gguf} -t {threads} -r 1 -o jsonl {bench}"
# a long prompt is read by several processes, so that none needs the machine to itself for long
LLAMA_STEPS = "{steps} {gguf} {states} {threads} {flash_repack}"
PERILUNE_PREFILL = "{perilune} bench prefill {checkpoint} --threads {threads} --json {bench}"
PERILUNE_DECODE = "{perilune} bench decode {checkpoint} --threads {threads} --json {bench}"

SHARE = "decode at 0, share of the reads between its steps"


def _perilune_bench(line: str, figures: dict[str, str]) -> Command:
    # it measures the machine's reads between steps, on memory of its own
    return Command(line, figures, peak_bytes="peak_rss_bytes")


JOBS = (
    Job(
        "prefill 512",
        (Command(f"{LLAMA_BENCH} -p 512 -n 0", {"prefill 512, tok/s": "avg_ts"}),),
        (_perilune_bench(f"{PERILUNE_PREFILL} --tokens 512", {"prefill 512, tok/s": "tokens_per_second"}),),
    ),
    Job(
        "decode",
        (Command(f"{LLAMA_BENCH} -p 0 -n 32", {"decode at 0, tok/s": "avg_ts"}),),
        (
            _perilune_bench(
                f"{PERILUNE_DECODE} --context 0 --tokens 32",
                {"decode at 0, tok/s": "tokens_per_second", SHARE: "share_of_ceiling"},
            ),
        ),
    ),
    Job(
        "neighbour",
        (Command(f"{LLAMA_BENCH} -p 0 -n 32", {"decode with a busy neighbour, tok/s": "avg_ts"}),),
        (
            _perilune_bench(
                f"{PERILUNE_DECODE} --context 0 --tokens 32",
                {"decode with a busy neighbour, tok/s": "tokens_per_second"},
            ),
        ),
        has_neighbour=True,
    ),
    Job(
        "first token",
        # llama-bench prints its line when the last prompt token's logits are there
        (Command(f"{LLAMA_BENCH} -p 16 -n 0 --no-warmup", {"start to first token, s": FIRST_OUTPUT}),),
        (
            Command(
                "{perilune} generate {checkpoint} --threads {threads} --max-tokens 1 --temperature 0 {generate}"
                ' --prompt "one two three four five six seven eight"',
                {"start to first token, s": FIRST_OUTPUT},
            ),
        ),
    ),
    Job(
        "prefill 4k",
        (
            *(Command(f"{LLAMA_STEPS} {start} {start + 1024}", {}) for start in range(0, 3072, 1024)),
            Command(f"{LLAMA_STEPS} 3072 4096", {"prefill 4096, tok/s": "prefill_tok_s"}),
        ),
        (_perilune_bench(f"{PERILUNE_PREFILL} --tokens 4096", {"prefill 4096, tok/s": "tokens_per_second"}),),
        most_repetitions=1,
    ),
    # llama.cpp continues from what the job before it has read
    Job(
        "decode 4k",
        (Command(f"{LLAMA_STEPS} 4096 decode 32", {"decode at 4k, tok/s": "decode_tok_s"}),),
        (
            _perilune_bench(
                f"{PERILUNE_DECODE} --context 4096 --tokens 32", {"decode at 4k, tok/s": "tokens_per_second"}
            ),
        ),
    ),
    Job(
        "32k",
        (
            *(Command(f"{LLAMA_STEPS} {start} {start + 1024}", {}) for start in range(4096, 32768, 1024)),
            Command(f"{LLAMA_STEPS} 32768 decode 16", {"decode at 32k, tok/s": "decode_tok_s"}),
        ),
        (
            _perilune_bench(
                f"{PERILUNE_DECODE} --context 32768 --tokens 16", {"decode at 32k, tok/s": "tokens_per_second"}
            ),
        ),
        most_repetitions=1,
    ),
)
# all but 32k, whose prompt takes llama.cpp an hour or more
USUAL_JOBS = tuple(job.name for job in JOBS if job.name != "32k")

VARIANTS = {
    "llama.cpp": Variant("llama", {"gguf": "{q8}", "bench": "-fa on --repack 1", "flash_repack": "1 1"}),
    "llama.cpp-stored": Variant("llama", {"gguf": "{q8}", "bench": "-fa on --repack 0", "flash_repack": "1 0"}),
    "llama.cpp-no-flash": Variant("llama", {"gguf": "{q8}", "bench": "-fa off --repack 1", "flash_repack": "0 1"}),
    "llama.cpp-bf16": Variant("llama", {"gguf": "{bf16}", "bench": "-fa on --repack 1", "flash_repack": "1 1"}),
    "perilune": Variant("perilune", {"bench": "--dense-weights int8", "generate": "--dense-weights int8"}),
    "perilune-int8": Variant(
        "perilune",
        {
            "bench": "--dense-weights int8 --activations int8",
            "generate": "--dense-weights int8 --activations int8",
        },
    ),
    "perilune-bf16": Variant("perilune", {"bench": "", "generate": ""}),
}

# figures in which less is better
LESS_IS_BETTER = ("start to first token, s", "peak memory, GB")
