import pytest
import torch
from torch import nn

from train.model import demo_config, initialised_model
from train.optimizer import Muon, optimizers, orthogonalise


@pytest.mark.parametrize("shape", [(2, 24, 24), (1, 16, 48), (3, 40, 8)])
def test_orthogonalised_matrices_keep_their_directions_with_singular_values_near_one(shape: tuple[int, int, int]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = orthogonalise(matrices)
    assert result.shape == matrices.shape
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    singular = torch.einsum("nri,nrc,nic->ni", left, result, right)
    # The published coefficients leave singular values between about 0.7 and 1.2 after five steps.
    assert singular.min() > 0.3
    assert singular.max() < 1.3


def test_matrices_of_one_shape_share_an_iteration_without_mixing():
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(8, 8, generator=generator) for _ in range(2)]
    gradients = [torch.randn(8, 8, generator=generator) for _ in range(2)]

    def update(indices: list[int]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(start[index].clone()) for index in indices]
        for parameter, index in zip(parameters, indices, strict=True):
            parameter.grad = gradients[index]
        Muon(parameters, lr=0.1).step()
        return [parameter.detach() for parameter in parameters]

    together = update([0, 1])
    torch.testing.assert_close(together[0], update([0])[0])
    torch.testing.assert_close(together[1], update([1])[0])


def test_every_parameter_belongs_to_exactly_one_optimizer():
    model = initialised_model(demo_config(), seed=0)
    muon, adam = optimizers(model, 1e-3, 1e-3, 0.0)
    owned = [id(p) for optimizer in (muon, adam) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    in_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    assert "model.layers.0.self_attn.q_proj.weight" in in_muon
    assert "model.layers.1.block_sparse_moe.experts.w1" in in_muon
    assert not in_muon & {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.block_sparse_moe.gate.weight"}
