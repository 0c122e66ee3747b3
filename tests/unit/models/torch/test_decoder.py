"""Hidden states of named layers beside the final one, against those of transformers."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.drafter.eagle3.hidden_states import read_hidden_states
from megatron_tlt.models.torch.decoder import TorchDecoder
from tests.helpers.tiny_models import hf_model, model_config, named_weights


def hf_states(model, text: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state after the final norm, and every layer's output, [T, H] each."""
    outputs: list[torch.Tensor] = []

    def take(_module, _inputs, out) -> None:
        outputs.append((out[0] if isinstance(out, tuple) else out).reshape(len(text), -1))

    handles = [layer.register_forward_hook(take) for layer in model.model.layers]
    with torch.no_grad():
        final = model.model(torch.tensor([text])).last_hidden_state[0]
    for handle in handles:
        handle.remove()
    return final, outputs


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_features_are_the_layers_outputs_and_the_final_state(family: str) -> None:
    model = hf_model(family)
    config = model_config(model)
    assert config.num_layers == 3
    decoder = TorchDecoder(config, aux_layers=(0, 1, 2))
    decoder.load_weights(named_weights(model))
    texts = [[5, 9, 11, 2, 77, 30, 8], [3, 4], list(range(1, 40))]
    for text, got in zip(texts, read_hidden_states(decoder, texts, 16, 32), strict=True):
        final, outputs = hf_states(model, text)
        want = torch.cat([*outputs, final], -1)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
