"""Trains a DSpark draft for a checkpoint on the checkpoint's own answers; the same command resumes it.

    python -m train.draft --target perilune/demo --out runs/draft --steps 4000

First the target answers prompts (the demo's questions, or the lines of `--prompts`), then the draft learns to foresee
seven tokens of these answers from the target's streams. `<out>/draft` is the draft as it is served
(`perilune serve CHECKPOINT --speculative <out>/draft`); `<out>/draft_log.jsonl` has the curve.

Loss: cross entropy of each place behind the right tokens, weighted by exp(-place / 4) as in DFlash (arXiv 2602.06036),
and the binary cross entropy of the confidence head against whether the draft's best token is the target's.
"""

import argparse
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from perilune.checkpoint.draft import draft_shapes
from perilune.checkpoint.loader import load_state
from perilune.config.draft import parse_draft_config
from perilune.config.model import ModelConfig, NormEps
from perilune.config.parse import load_model_config
from perilune.engine.llm import LLM
from perilune.models.draft.model import DraftModel
from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel, build_model
from train.draft_pass import Blocks, draft_hidden, draft_logits
from train.optimizer import optimizers
from train.outputs import OUTPUTS_FILE, Output, demo_prompts, read_outputs, read_prompts, write_outputs

NUM_DRAFTS = 7
TRAINING_FILE, LOG_FILE, DRAFT_DIR = "draft_training.pt", "draft_log.jsonl", "draft"
# Answers of like lengths share a batch of so many tokens, with so many blocks in each.
BATCH_TOKENS, NUM_ANCHORS = 1536, 8
MATRIX_LR, OTHER_LR, WEIGHT_DECAY = 5e-3, 3e-3, 0.01
WARM_UP = 0.02
PLACE_DECAY = 4.0
CONFIDENCE_WEIGHT = 0.2
SAVE_EVERY, LOG_EVERY = 200, 50
HELD_OUT = 64  # answers that are only judged


@dataclass(frozen=True)
class Size:
    """The draft's own widths; what else it needs follows from the target."""

    num_layers: int = 1
    num_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    head_dim: int = 32
    rope_dim: int = 16
    inner: int = 768
    markov_rank: int = 64


def draft_values(target: ModelConfig, size: Size) -> dict[str, Any]:
    """The `config.json` of a k3_dspark draft that taps the target's last layers but one."""
    taps = list(range(max(0, target.num_hidden_layers - 4), target.num_hidden_layers - 1))
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_heads,
        "q_lora_rank": size.q_lora_rank,
        "kv_lora_rank": size.kv_lora_rank,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.rope_dim,
        "v_head_dim": size.head_dim,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_layer_ids": taps,
        "num_target_layers": len(taps),
        "mask_token_id": target.vocab_size - 2,
        "block_size": NUM_DRAFTS,
        "markov_rank": size.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


class DraftTraining:
    """Draft, optimizers and place of one run; `state` and `restore` carry it over an interruption."""

    def __init__(self, target: KimiModel, values: dict[str, Any], outputs: Sequence[Output], *, num_steps: int):
        self.target, self.num_steps, self.step_index = target, num_steps, 0
        usable = [item for item in outputs if len(item.token_ids) - item.num_prompt_tokens >= 2]
        self.held_out = usable[:HELD_OUT]
        self.outputs = sorted(usable[HELD_OUT:], key=lambda item: len(item.token_ids))
        config = parse_draft_config(dict(values))
        self.draft = DraftModel(config, target.model.embed_tokens, target.lm_head, torch.float32)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.draft.named_parameters():
            _initialise(name, parameter, generator)
        self.optimizers = optimizers(self.draft, MATRIX_LR, OTHER_LR, WEIGHT_DECAY)
        self.base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def step(self) -> dict[str, float]:
        """One update; returns the losses."""
        source = random.Random(self.step_index)
        losses, *_ = self._losses(self._draw(source), source)
        (losses["loss"] + CONFIDENCE_WEIGHT * losses["confidence_loss"]).backward()
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * _rate_factor(self.step_index / self.num_steps)
            optimizer.step()
            optimizer.zero_grad()
        self.step_index += 1
        return {name: loss.item() for name, loss in losses.items()}

    @torch.no_grad()
    def judge(self) -> list[float]:
        """For each place, the share of held-out drafts that are right where all before them are."""
        _, right, is_known = self._losses(self.held_out, random.Random(0))
        right, is_known = right.flatten(0, 1).float(), is_known.flatten(0, 1)
        reached = torch.cat((torch.ones_like(right[:, :1]), right[:, :-1]), 1).cumprod(1) * is_known
        return [float(share) for share in (reached * right).sum(0) / reached.sum(0).clamp(min=1)]

    def _draw(self, source: random.Random) -> Sequence[Output]:
        """Answers of a batch: one, and those next to it in length."""
        index = source.randrange(len(self.outputs))
        count = max(1, BATCH_TOKENS // len(self.outputs[index].token_ids))
        near = self.outputs[max(0, index - 2 * count) : index + 2 * count + 1]
        return source.sample(near, min(count, len(near)))

    def _losses(self, items: Sequence[Output], source: random.Random) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The losses, and which best tokens [B, A, K] are the target's, and which of those there are."""
        token_ids, anchors = _batch(items, source)
        taps = self._taps(token_ids)
        blocks = Blocks(anchors, token_ids.shape[1], NUM_DRAFTS)
        hidden = draft_hidden(self.draft, taps, token_ids, blocks)
        places = anchors[..., None] + torch.arange(NUM_DRAFTS)
        previous, targets = (_at(token_ids, places + shift) for shift in (0, 1))
        ends = torch.tensor([len(item.token_ids) for item in items])[:, None, None]
        is_known = places + 1 < ends
        logits, confidence = draft_logits(self.draft, hidden, previous)
        assert confidence is not None
        right = (logits.argmax(-1) == targets) & is_known
        weights = is_known * torch.exp(-torch.arange(NUM_DRAFTS) / PLACE_DECAY)
        entropy = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
        doubt = F.binary_cross_entropy_with_logits(confidence, right.float(), reduction="none")
        losses = {
            "loss": (entropy * weights).sum() / weights.sum(),
            "confidence_loss": (doubt * is_known).sum() / is_known.sum(),
        }
        return losses, right, is_known

    @torch.no_grad()
    def _taps(self, token_ids: Tensor) -> Tensor:
        """[B, L, layers * D] of the target's streams."""
        found: dict[int, Tensor] = {}
        self.target(ForwardBatch.whole(token_ids, torch.zeros(1, dtype=torch.int64)), found.__setitem__)
        taps = torch.cat([found[layer] for layer in self.draft.config.target_layer_ids], dim=-1)
        return taps.view(*token_ids.shape, -1)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step_index,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.draft.load_state_dict(state["draft"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.step_index = state["step"]


def _initialise(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    with torch.no_grad():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        elif "markov_w2" in name or "o_proj" in name or "down_proj" in name:
            parameter.zero_()
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def _rate_factor(progress: float) -> float:
    return min(1.0, progress / WARM_UP + 0.01, max(1 - progress, 0.01) * 1.25)


def _batch(items: Sequence[Output], source: random.Random) -> tuple[Tensor, Tensor]:
    """token_ids [B, L], padded at the end, and anchors [B, A] among the tokens of the answers but the last."""
    length = max(len(item.token_ids) for item in items)
    token_ids = torch.tensor([[*item.token_ids, *[0] * (length - len(item.token_ids))] for item in items])
    anchors = [
        [source.randrange(item.num_prompt_tokens, len(item.token_ids) - 1) for _ in range(NUM_ANCHORS)]
        for item in items
    ]
    return token_ids, torch.tensor(anchors)


def _at(token_ids: Tensor, places: Tensor) -> Tensor:
    """token_ids [B, L] at places [B, A, K], the last token for those behind the end."""
    return token_ids.gather(1, places.flatten(1).clamp(max=token_ids.shape[1] - 1)).view(places.shape)


def write_draft(directory: Path, draft: DraftModel, values: dict[str, Any]) -> None:
    """Writes a draft in the layout that is served, its matrices in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    state = draft.state_dict()
    tensors = {name: state[name].to(torch.bfloat16).contiguous() for name in draft_shapes(draft.config)}
    save_file(tensors, directory / "model.safetensors.new", metadata={"format": "pt"})
    os.replace(directory / "model.safetensors.new", directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def train(target: Path, out: Path, *, num_steps: int, num_answers: int, prompts: Path | None, size: Size) -> None:
    """Answers, training and the draft in `out`; goes on where an interruption left it."""
    out.mkdir(parents=True, exist_ok=True)
    llm = LLM(target, max_num_seqs=32, prefix_cache=False)
    vocab_size = llm.core.limits.vocab_size
    asked = demo_prompts(num_answers, llm.tokenizer, vocab_size, seed=0)
    wanted = list(asked if prompts is None else read_prompts(prompts, llm.tokenizer))
    write_outputs(llm, wanted, out / OUTPUTS_FILE, seed=0)
    del llm
    config = load_model_config(target)
    values = draft_values(config, size)
    model = build_model(config, load_state(target, config), NormEps(), torch.float32)
    training = DraftTraining(model, values, read_outputs(out / OUTPUTS_FILE), num_steps=num_steps)
    if (out / TRAINING_FILE).exists():
        training.restore(torch.load(out / TRAINING_FILE))
    run_steps(training, out, values)


def run_steps(training: DraftTraining, out: Path, values: dict[str, Any]) -> None:
    """All steps that are left; saves now and then, and at the end."""
    with tqdm(total=training.num_steps, initial=training.step_index, unit="step") as bar:
        while training.step_index < training.num_steps:
            losses = training.step()
            bar.update()
            is_last = training.step_index == training.num_steps
            if training.step_index % LOG_EVERY == 0 or is_last:
                entry = {"step": training.step_index, **losses, "acceptance": training.judge()}
                bar.set_postfix_str(" ".join(f"{share:.2f}" for share in entry["acceptance"]))
                with (out / LOG_FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            if training.step_index % SAVE_EVERY == 0 or is_last:
                torch.save(training.state(), out / f"{TRAINING_FILE}.new")
                os.replace(out / f"{TRAINING_FILE}.new", out / TRAINING_FILE)
                write_draft(out / DRAFT_DIR, training.draft, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/draft"))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--answers", type=int, default=16384, help="how many of the demo's questions are answered")
    parser.add_argument("--prompts", type=Path, help="JSON lines with messages or prompt, for any other target")
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = vars(parser.parse_args())
    size = Size(**{name: given[name] for name in vars(Size())})
    train(
        given["target"],
        given["out"],
        num_steps=given["steps"],
        num_answers=given["answers"],
        prompts=given["prompts"],
        size=size,
    )


if __name__ == "__main__":
    main()
