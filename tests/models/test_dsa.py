import torch

from perilune.models.dsa import KEY_GROUP
from tests.models.passes import filled_cache, pass_over


def run(model, length):
    indexer = model.model.layers[1].self_attn.indexer
    generator = torch.Generator().manual_seed(0)
    x, q_latent = (torch.randn(length, 32, generator=generator) for _ in range(2))
    cache = filled_cache(model, torch.nan).views
    blocks = list(range(-(-length // 4)))
    k, head_logits = indexer.wk(x), indexer.weights_proj(x)
    (selected,) = indexer(k, head_logits, q_latent, pass_over([([0] * length, 0, blocks, 0)], cache))
    return selected, cache[KEY_GROUP][0].flatten(0, 1), indexer.k_norm(k)


def test_up_to_top_k_tokens_every_row_is_taken_and_keys_are_written_all_the_same(model):
    selected, written, keys = run(model, 8)
    assert selected is None
    assert torch.equal(written[:8], keys)
    assert written[8:].isnan().all()


def test_beyond_top_k_each_query_gets_its_own_rows(model):
    selected, written, keys = run(model, 13)
    assert selected.shape == (13, 8)
    assert torch.equal(written[:13], keys)
    for position, rows in enumerate(selected):
        chosen = rows[rows >= 0]
        assert len(set(chosen.tolist())) == len(chosen) == min(8, position + 1)
        assert int(chosen.max()) <= position


def test_index_keys_are_mean_free_before_the_bias(model):
    indexer = model.model.layers[1].self_attn.indexer
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    raw = x @ indexer.wk.weight.float().T
    centred = raw - raw.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed * indexer.k_norm.weight + indexer.k_norm.bias
    assert torch.allclose(indexer.k_norm(indexer.wk(x)), expected, atol=1e-5)


def test_head_weights_are_scaled_and_may_be_negative(model):
    indexer = model.model.layers[1].self_attn.indexer
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    weights = indexer.head_weights(indexer.weights_proj(x))
    assert torch.allclose(weights, x @ indexer.weights_proj.weight.float().T / (4 * 32) ** 0.5, atol=1e-6)
    assert (weights < 0).any()
    assert (weights > 0).any()
