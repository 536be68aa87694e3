import torch

from perilune.models.inputs import ForwardBatch
from perilune.models.kda import CONV_GROUP, STATE_GROUP
from tests.models.passes import filled_cache, pass_over


def some_x(rows):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))


def test_decoding_and_long_sequences_in_one_pass_equal_each_alone(model):
    attention, x = model.model.layers[0].self_attn, some_x(30)
    whole = attention(x, ForwardBatch.whole(torch.zeros(1, 30, dtype=torch.int64)))
    storage = filled_cache(model, torch.nan)
    storage.zero_slots([1, 4])
    cache = storage.views
    first = attention(x[:29], pass_over([([0] * 29, 0, list(range(8)), 4)], cache))
    both = torch.cat((x[29:], x[:17]))  # the sequence in slot 4 decodes, the one in slot 1 begins
    work = [([0], 29, list(range(8)), 4), ([0] * 17, 0, list(range(8, 13)), 1)]
    mixed = attention(both, pass_over(work, cache))
    assert torch.allclose(torch.cat((first, mixed[:1])), whole, atol=1e-5)
    assert torch.allclose(mixed[1:], whole[:17], atol=1e-5)


def test_only_the_own_layers_and_sequences_states_change(model):
    attention, x = model.model.layers[2].self_attn, some_x(5)
    storage = filled_cache(model, 3.0)
    storage.zero_slots([2])
    attention(x, pass_over([([0] * 5, 0, [0, 1], 2)], storage.views))
    for group in (STATE_GROUP, CONV_GROUP):
        own, others = storage.views[group][1, 2], storage.views[group].clone()
        assert own.any()
        others[1, 2] = 3.0
        others[0, 2] = 3.0  # zeroed, as a sequence's slot is in every layer
        assert (others == 3.0).all()
        assert not storage.views[group][0, 2].any()


def test_the_padding_of_the_decay_slopes_is_not_read(config, model):
    attention, x = model.model.layers[0].self_attn, some_x(5)
    batch = ForwardBatch.whole(torch.zeros(1, 5, dtype=torch.int64))
    before = attention(x, batch)
    kept = attention.A_log
    try:
        poisoned = kept.clone()
        poisoned[config.kda.num_heads :] = torch.nan
        attention.A_log = torch.nn.Parameter(poisoned, requires_grad=False)
        assert torch.equal(attention(x, batch), before)
    finally:
        attention.A_log = kept
