import torch

from perilune.models.inputs import ForwardBatch
from perilune.models.mla import LATENT_GROUP
from tests.models.passes import filled_cache, pass_over


def mixer(model):
    return model.model.layers[1].self_attn


def some_x(rows):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))


def latent_rows(attention, x):
    return attention.latent_rows(attention.kv_a_proj_with_mqa(x))


def test_the_cached_row_is_the_normed_latent_and_the_raw_shared_part(model):
    attention, x = mixer(model), some_x(5)
    projected = x @ attention.kv_a_proj_with_mqa.weight.float().T
    latent, shared = projected[:, :32], projected[:, 32:]
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * attention.kv_a_layernorm.weight
    assert torch.allclose(latent_rows(attention, x), torch.cat((latent, shared), -1), atol=1e-6)


def test_each_heads_rows_of_kv_b_are_keys_then_values_and_are_not_copied(model):
    attention = mixer(model)
    weight = attention.kv_b_proj.weight
    w_uk, w_uv = attention.absorbed_weights()
    assert torch.equal(w_uk[1], weight[64:96])
    assert torch.equal(w_uv[1], weight[96:128])
    assert w_uk.data_ptr() == weight.data_ptr()


def test_a_pass_writes_its_rows_and_reads_those_before(model):
    attention, x = mixer(model), some_x(12)
    whole = attention(x, ForwardBatch.whole(torch.zeros(1, 12, dtype=torch.int64)))
    cache = filled_cache(model, torch.nan).views
    blocks, pieces = [7, 2, 9], []
    for first, last in [(0, 5), (5, 11), (11, 12)]:
        batch = pass_over([([0] * (last - first), first, blocks, 0)], cache)
        pieces.append(attention(x[first:last], batch))
    assert torch.allclose(whole, torch.cat(pieces), atol=1e-5)
    written = cache[LATENT_GROUP][0, blocks].flatten(0, 1)
    assert torch.equal(written[:11], latent_rows(attention, x)[:11])
    assert cache[LATENT_GROUP][1].isnan().all()


def test_a_lone_token_attends_to_itself_and_its_output_is_gated_by_the_layers_input(model):
    attention, x = mixer(model), some_x(1)
    _, w_uv = attention.absorbed_weights()
    value = (w_uv @ latent_rows(attention, x)[0, :32]).flatten()
    gate = 1 / (1 + torch.exp(-x @ attention.g_proj.weight.float().T))
    expected = (value * gate) @ attention.o_proj.weight.float().T
    found = attention(x, ForwardBatch.whole(torch.zeros(1, 1, dtype=torch.int64)))
    assert torch.allclose(found, expected, atol=1e-6)
    assert found.abs().max() > 1e-3
