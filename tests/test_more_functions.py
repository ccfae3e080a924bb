"""Random streams and adapters: small parts of the scripts that the loop's tests use and do not look into."""

import itertools
import types

import numpy as np
import pytest
import torch
import transformers

LANGUAGE = pytest.mark.setting("grpo_rlhf", "ppo_rlhf")


def test_streams_of_a_seed_are_apart(script):
    """Streams of one seed, and those of its neighbours, have nothing in common; the same seed gives them again
    (B29, vwxyzjn/cleanrl 83a2529c: a seed that is not used)."""
    draw = lambda stream: tuple(np.random.default_rng(stream).integers(2**60, size=3))
    word = lambda stream: int(stream.generate_state(1)[0])
    every = [stream for seed in (0, 1, 2, 3, 10**9) for stream in script.streams(seed)]
    assert len({*map(draw, every)}) == len({*map(word, every)}) == len(every) >= 5 * 3
    assert [*map(draw, script.streams(3))] == [*map(draw, script.streams(3))]


@LANGUAGE
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_start_as_the_model_without_dropout(script, kind):
    """Before the first step a model with adapters is the model, also in training mode and twice the same (B86,
    unslothai/unsloth-zoo #832; B88, huggingface/trl #3194); only the adapters are trained; the reference has
    them switched off, the model not (B88, huggingface/trl #495)."""
    pytest.importorskip("peft")
    common = dict(vocab_size=13, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    if kind == "gpt2":
        drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = transformers.GPT2Config(**common, **drop, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    else:
        sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        config = transformers.LlamaConfig(**common, **sizes, max_position_embeddings=16)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        start = model(ids).logits
    adapted = script.add_lora(model, 2)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    with torch.no_grad():
        for mode in (False, True, True):
            torch.testing.assert_close(adapted.train(mode)(ids).logits, start, atol=1e-6, rtol=0)
        for _, p in adapted.named_parameters():
            if p.requires_grad:
                p.add_(0.3)
        moved = [adapted.train(mode)(ids).logits for mode in (False, True, True)]
        assert all(torch.equal(a, b) for a, b in itertools.pairwise(moved))
        assert (moved[0] - start).abs().max() > 1e-3
        reference = script.reference_of(adapted, types.SimpleNamespace(kl_coef=0.1, lora_rank=2))
        torch.testing.assert_close(reference(input_ids=ids).logits, start, atol=1e-6, rtol=0)
        assert torch.equal(adapted(ids).logits, moved[0])
    assert [name for name, p in adapted.named_parameters() if p.requires_grad] == trained


@LANGUAGE
@pytest.mark.parametrize("size", [1, 5, 12])
def test_every_prompt_once_an_epoch(script, size):
    """Any cut of the endless sequence gives each row once an epoch, in another order in each epoch and for each seed
    (the kind of B26 and B29)."""
    whole = script.prompt_indices(0, 6 * size, size, 7)
    epochs = [whole[i : i + size] for i in range(0, 6 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    cut = [i for first in range(0, 6 * size, 3) for i in script.prompt_indices(first, 3, size, 7)]
    assert cut[: 6 * size] == whole
    if size > 1:
        assert len({*map(tuple, epochs)}) > 3 and script.prompt_indices(0, 6 * size, size, 8) != whole


@pytest.mark.functions("masked_mean")
def test_a_nan_that_counts_is_not_hidden(script):
    """NaN outside the mask is nothing, NaN inside it is told (B85, verl-project/verl #2377; the kind of B97)."""
    x = torch.tensor([1.0, float("nan"), 3.0])
    assert script.masked_mean(x, torch.tensor([True, False, True])) == 2
    assert script.masked_mean(x, torch.tensor([True, True, False])).isnan()
