"""An independent float64 model, written from the published equations alone, that computes and checks golden logits.

It imports nothing from the package: recurrent KDA, plain MLA, exact top-k, one token row after another.

    python tests/goldens/oracle.py DIR                     compare DIR/golden.npz with this model
    python tests/goldens/oracle.py DIR --write N --seed S  write DIR/golden.npz for N random tokens

Shape letters: T tokens, S earlier tokens, H heads, D head channels, E experts, C hidden width.
"""

import argparse
import json
import struct
from pathlib import Path

import numpy as np

Array = np.ndarray
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
LATENT_EPS = 1e-6
L2_EPS = 1e-6
INDEXER_EPS = 1e-5


def read_shard(path: Path) -> dict[str, Array]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        elif entry["dtype"] == "F32":
            values = np.frombuffer(raw, "<f4").astype(np.float64)
        else:
            values = np.frombuffer(raw, np.uint8)
        tensors[name.removeprefix("language_model.")] = values.reshape(entry["shape"])
    return tensors


def dequantize(packed: Array, scale: Array) -> Array:
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return E2M1[codes] * np.repeat(2.0 ** (scale.astype(np.int64) - 127), 32, axis=1)


def read_weights(directory: Path) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= read_shard(path)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        base = name.removesuffix("_packed")
        tensors[base] = dequantize(tensors.pop(name), tensors.pop(base + "_scale"))
    return tensors


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class Oracle:
    """One checkpoint; `forward` gives the logits of every position. `margins` keeps the closest choices made."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.text = config["text_config"]
        self.dsa = config.get("dsa_config", self.text.get("dsa_config"))
        self.linear = self.text["linear_attn_config"]
        self.w = read_weights(directory)
        self.eps = self.text["rms_norm_eps"]
        self.margins = {"router": np.inf, "indexer": np.inf}

    def linear_map(self, x: Array, name: str) -> Array:
        return x @ self.w[name + ".weight"].T

    def forward(self, token_ids: Array) -> Array:
        p = self.w["model.embed_tokens.weight"][token_ids]
        bank: list[Array] = []
        for layer in range(self.text["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = self.mix(bank, p, at + "self_attention_res") if bank else p
            starts_block = layer % self.text["attn_res_block_size"] == 0
            if starts_block:
                bank = [*bank, p]
            x = rms(h, self.w[at + "input_layernorm.weight"], self.eps)
            is_kda = layer + 1 in self.linear["kda_layers"]
            a = self.kda(x, at + "self_attn.") if is_kda else self.mla(x, at + "self_attn.")
            p = a if starts_block else p + a
            m = self.mix(bank, p, at + "mlp_res")
            x = rms(m, self.w[at + "post_attention_layernorm.weight"], self.eps)
            is_dense = layer < self.text["first_k_dense_replace"]
            p = p + (self.gated(x, at + "mlp.") if is_dense else self.moe(x, at + "block_sparse_moe."))
        y = self.mix(bank, p, "model.output_attn_res")
        return self.linear_map(rms(y, self.w["model.norm.weight"], self.eps), "lm_head")

    def mix(self, bank: list[Array], p: Array, name: str) -> Array:
        a = self.w[name + "_norm.weight"] * self.w[name + "_proj.weight"][0]
        v = np.stack([*bank, p])
        scores = (v / np.sqrt((v * v).mean(-1, keepdims=True) + self.eps) * a).sum(-1)
        return (softmax(scores, 0)[..., None] * v).sum(0)

    def short_conv(self, u: Array, weight: Array) -> Array:
        taps = weight.shape[-1]
        padded = np.concatenate([np.zeros((taps - 1, u.shape[1])), u])
        y = sum(padded[j : j + len(u)] * weight[:, 0, j] for j in range(taps))
        return y * sigmoid(y)

    def kda(self, x: Array, at: str) -> Array:
        heads, width = self.linear["num_heads"], self.linear["head_dim"]
        shape = (len(x), heads, width)
        q, k, v = (
            self.short_conv(self.linear_map(x, f"{at}{n}_proj"), self.w[f"{at}{n}_conv1d.weight"]).reshape(shape)
            for n in "qkv"
        )
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + L2_EPS) * width**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + L2_EPS)
        z = self.linear_map(self.linear_map(x, at + "f_a_proj"), at + "f_b_proj") + self.w[at + "dt_bias"]
        slope = np.exp(self.w[at + "A_log"][:heads])[:, None]
        g = self.linear["gate_lower_bound"] * sigmoid(slope * z.reshape(shape))
        beta = sigmoid(self.linear_map(x, at + "b_proj"))
        state, o = np.zeros((heads, width, width)), np.zeros(shape)
        for t in range(len(x)):
            state = np.exp(g[t])[:, :, None] * state
            error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            state = state + beta[t][:, None, None] * k[t][:, :, None] * error[:, None, :]
            o[t] = np.einsum("hkv,hk->hv", state, q[t])
        o = rms(o, self.w[at + "o_norm.weight"], self.eps)
        o = o * sigmoid(self.linear_map(x, at + "g_proj")).reshape(shape)
        return self.linear_map(o.reshape(len(x), -1), at + "o_proj")

    def mla(self, x: Array, at: str) -> Array:
        t, heads, rank = len(x), self.text["num_attention_heads"], self.text["kv_lora_rank"]
        nope, rope = self.text["qk_nope_head_dim"], self.text["qk_rope_head_dim"]
        ql = rms(self.linear_map(x, at + "q_a_proj"), self.w[at + "q_a_layernorm.weight"], LATENT_EPS)
        q = self.linear_map(ql, at + "q_b_proj").reshape(t, heads, nope + rope)
        a = self.linear_map(x, at + "kv_a_proj_with_mqa")
        c, kr = rms(a[:, :rank], self.w[at + "kv_a_layernorm.weight"], LATENT_EPS), a[:, rank:]
        kv = self.linear_map(c, at + "kv_b_proj").reshape(t, heads, -1)
        scores = np.einsum("thn,shn->ths", q[..., :nope], kv[..., :nope]) + np.einsum("thr,sr->ths", q[..., nope:], kr)
        allowed = np.tril(np.ones((t, t), bool))
        if self.dsa is not None:
            allowed = self.select(x, ql, at + "indexer.")
        scores = np.where(allowed[:, None, :], scores * (nope + rope) ** -0.5, -np.inf)
        o = np.einsum("ths,shv->thv", softmax(scores, -1), kv[..., nope:]).reshape(t, -1)
        return self.linear_map(o * sigmoid(self.linear_map(x, at + "g_proj")), at + "o_proj")

    def select(self, x: Array, ql: Array, at: str) -> Array:
        heads, width, topk = (self.dsa[key] for key in ("index_n_heads", "index_head_dim", "index_topk"))
        qi = self.linear_map(ql, at + "wq_b").reshape(len(x), heads, width)
        k = self.linear_map(x, at + "wk")
        k = k - k.mean(-1, keepdims=True)
        k = k / np.sqrt((k * k).mean(-1, keepdims=True) + INDEXER_EPS) * self.w[at + "k_norm.weight"]
        k = k + self.w.get(at + "k_norm.bias", np.zeros(width))
        weight = self.linear_map(x, at + "weights_proj") * (heads * width) ** -0.5
        scores = np.einsum("tj,tjs->ts", weight, np.maximum(np.einsum("tjd,sd->tjs", qi, k), 0))
        chosen = np.zeros((len(x), len(x)), bool)
        for t in range(len(x)):
            order = np.lexsort((np.arange(t + 1), -scores[t, : t + 1]))
            chosen[t, order[:topk]] = True
            if t + 1 > topk:
                gap = scores[t, order[topk - 1]] - scores[t, order[topk]]
                self.margins["indexer"] = min(self.margins["indexer"], float(gap))
        return chosen

    def situ(self, gate: Array, up: Array) -> Array:
        a, b = self.text["activation_situ_beta"], self.text["activation_situ_linear_beta"]
        return a * np.tanh(gate / a) * sigmoid(gate) * b * np.tanh(up / b)

    def gated(self, x: Array, at: str) -> Array:
        inner = self.situ(self.linear_map(x, at + "gate_proj"), self.linear_map(x, at + "up_proj"))
        return self.linear_map(inner, at + "down_proj")

    def moe(self, x: Array, at: str) -> Array:
        s, topk = sigmoid(self.linear_map(x, at + "gate")), self.text["num_experts_per_token"]
        biased = s + self.w[at + "gate.e_score_correction_bias"]
        z = self.linear_map(x, at + "routed_expert_down_proj")
        y = np.zeros_like(z)
        for t in range(len(x)):
            order = np.argsort(-biased[t], kind="stable")
            gap = biased[t, order[topk - 1]] - biased[t, order[topk]]
            self.margins["router"] = min(self.margins["router"], float(gap))
            chosen = order[:topk]
            weight = s[t, chosen]
            if self.text["moe_renormalize"]:
                weight = weight / (weight.sum() + 1e-20)
            for e, share in zip(chosen, weight * self.text["routed_scaling_factor"], strict=True):
                expert = f"{at}experts.{e}."
                inner = self.situ(self.linear_map(z[t], expert + "w1"), self.linear_map(z[t], expert + "w3"))
                y[t] += share * self.linear_map(inner, expert + "w2")
        y = rms(y, self.w[at + "routed_expert_norm.weight"], self.eps)
        return self.linear_map(y, at + "routed_expert_up_proj") + self.gated(x, at + "shared_experts.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    oracle, golden = Oracle(args.directory), args.directory / "golden.npz"
    if args.write:
        ids = np.random.default_rng(args.seed).integers(0, oracle.text["vocab_size"], args.write)
        logits = oracle.forward(ids)
        np.savez_compressed(golden, token_ids=ids, logits=logits.astype(np.float32))
        print(f"wrote {golden}; std of the logits {logits.std():.3f}")
    else:
        stored = np.load(golden)
        ours, theirs = oracle.forward(stored["token_ids"]), stored["logits"].astype(np.float64)
        print(f"relative_error {np.linalg.norm(ours - theirs) / np.linalg.norm(theirs):.3e}")
    print("smallest margins: " + ", ".join(f"{name} {gap:.2e}" for name, gap in oracle.margins.items()))


if __name__ == "__main__":
    main()
