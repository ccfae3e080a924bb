"""--rollout vllm: our side of it against a stand-in (fake_vllm.py), and against vLLM where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import fake_vllm
import pytest
import torch
import transformers
from test_loop_grpo import lines
from torch.testing import assert_close

pytestmark = [pytest.mark.setting("grpo_rlhf"), pytest.mark.flags("rollout", "vllm_memory")]
STOPS = [1, 9]
SMALL = dict(
    num_prompts=16, max_new_tokens=6, num_minibatches=2, update_epochs=2, total_steps=3, num_eval=4, eval_every=0,
    learning_rate=1e-2, warmup_steps=0, temperature=0.7, device="cpu", rollout="vllm", group_size=4, eval_samples=2,
    kl_coef=0.05,
)  # fmt: skip
REWARD = """
import os, pathlib
def digits(prompts, texts, rows):
    left = pathlib.Path("stop")
    if left.exists():
        number = int(left.read_text()) - 1
        left.write_text(str(number))
        if number == 0:
            left.unlink()
            os.kill(os.getpid(), 15)
    return [sum(map(int, text.replace("=", ""))) % 5 / 4 if text.replace("=", "") else 0.0 for text in texts]
"""


def make_world(script, root):
    """A small random Llama with a generation config full of traps, prompts and a reward function."""
    tokenizer = script.digit_tokenizer()
    sizes = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=13
    )
    sizes |= dict(max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False)
    sizes |= dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    traps = dict(top_k=2, temperature=0.3, do_sample=True, repetition_penalty=1.5, eos_token_id=STOPS)
    (root / "model/generation_config.json").write_text(json.dumps(traps))
    rows = [{"prompt": "1234567"[: 1 + i % 5] + f"{i}=", "answer": "1"} for i in range(29)]
    rows.append({"prompt": "1234567890=", "answer": "1"})  # held out, and the longest
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARD)
    return root


@pytest.fixture(scope="session")
def world(script, tmp_path_factory):
    return make_world(script, tmp_path_factory.mktemp("world"))


@pytest.fixture
def engine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return fake_vllm.install(monkeypatch)


def flags_of(script, world, **flags):
    files = dict(
        model=str(world / "model"), dataset=str(world / "data.jsonl"), reward=f"{world / 'rewards.py'}:digits"
    )
    return script.flags(**files | SMALL | flags)


def train(script, world, **flags):
    return script.main(script.Args(**flags_of(script, world, **flags)))


def new_engine(script, world, model, stops, **flags):
    """The engine with the weights of the model, and room for eight tokens of a prompt."""
    task = script.Task(tokenizer=None, stops=stops, rows=[{"ids": [2] * 8}], held_out=[], rewards={})
    sampler = script.Engine(model, task, script.Args(**flags_of(script, world, **flags)), torch.Generator())
    sampler.refresh()
    return sampler


def plain(model, ids, tokens, temperature):
    """Log-probabilities of `tokens` after `ids`, one forward for each."""
    out = []
    for i, token in enumerate(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids + tokens[:i]])).logits[0, -1].float()
        out.append((logits / temperature).log_softmax(-1)[token].item())
    return out


def test_what_is_sampled_is_scored_at_every_step(script, world, engine):
    """Weights go to the engine before the first batch and after every update, cached prompts are forgotten then, and
    log-probabilities are those of the distribution at --temperature: sampler and trainer agree all the time (B115,
    huggingface/trl #4159; B116, #3867). A large step in between makes anything stale visible."""
    out = train(script, world)
    (only,) = engine.started
    steps = lines(out)[1:]
    assert len(steps) == 3 and all(row["losses/mismatch"] < 1e-5 for row in steps)
    assert {params.temperature for params in only.asked} <= {0.0, 0.7} and only.memory == 0.3
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{out['folder']}/model")
    start = transformers.AutoModelForCausalLM.from_pretrained(world / "model")
    pairs = [(a, b) for a, b in zip(model.parameters(), start.parameters())]
    assert max((a - b).abs().max().item() for a, b in pairs) > 5e-3  # it moved
    for (name, mine), a in zip(only.model.named_parameters(), model.parameters()):
        assert_close(mine, a.data), name


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_tokens_and_logps_of_the_engine(script, world, engine, temperature):
    """Every response ends at the first stop id of either kind, which stays in it, has its own tokens and numbers in
    its own row, side by side with those to the same prompt, and none after its end (B82, B103, B115)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "model")
    sampler = new_engine(script, world, model, STOPS)
    prompts, generator = [[3, 4, 2], [5, 2], [3, 4, 2], [6, 7, 8, 2]], torch.Generator().manual_seed(0)
    tokens, logps, entropies = sampler.generate(prompts, 5, temperature, generator)
    assert tokens.shape == logps.shape == (20, 6) and tokens.dtype == torch.long
    assert_close(entropies, -logps)
    ends = set()
    mask = script.response_mask(tokens, STOPS)
    for i, row in enumerate(tokens.tolist()):
        said = [token for token, kept in zip(row, mask[i]) if kept]
        assert_close(
            logps[i, : len(said)],
            torch.tensor(plain(model, prompts[i // 5], said, temperature)),
            atol=1e-5,
            rtol=1e-5,
        )
        ends.add(said[-1] if len(said) < 6 else None)
    assert ends == {1, 9, None}
    assert all(
        params.stop_token_ids == STOPS for params in sampler.llm.asked
    )  # and none is waited for in vain


def test_every_response_has_random_numbers_of_its_own(script, world, engine):
    """The engine draws the i-th response to a prompt with seed + i: seeds of neighbours that lie side by side would give
    one prompt's answers again to the next (B29, B118, huggingface/trl #2824). Other numbers, other answers; the
    same numbers, the same."""
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "model")
    model.lm_head.weight.data.zero_()  # every token is as likely
    sampler, prompts = new_engine(script, world, model, [99], max_new_tokens=12), [[3, 4, 2]] * 4

    def draw(seed):
        return sampler.generate(prompts, 8, 1.0, torch.Generator().manual_seed(seed))[0].tolist()

    assert len(set(map(tuple, draw(0)))) == 32
    assert draw(0) == draw(0) != draw(1)


def test_same_seed_same_run_and_a_resumed_run_goes_on(script, world, engine):
    """A run is a function of its seed, and a run stopped by a signal and resumed equals one that was not (B118)."""
    whole = train(script, world, run_name="whole", total_steps=4)
    again = train(script, world, run_name="again", total_steps=4)
    assert lines(whole) == lines(again)
    # calls of the reward: two for the first evaluation, then one a step
    with open("stop", "w") as file:
        file.write("4")
    with pytest.raises(SystemExit) as stopped:
        train(script, world, run_name="cut", total_steps=4)
    assert stopped.value.code == 128 + 15
    done = torch.load("runs/cut/checkpoint.pt", weights_only=True)["step"]
    assert 0 < done < 4
    end = script.main(script.command_line(script.words(resume="runs/cut", device="cpu")))
    assert lines(end) == lines(whole)
    assert len(engine.started) == 4


def test_weights_that_do_not_arrive_are_seen_at_once(script, world, engine):
    """The engine starts with random weights: a layer that it does not take is seen by the check of the first batch,
    before anything is learnt (B116). vLLM 0.32 on CPUs loses a tied output layer in this way."""
    engine.lost = ("lm_head.weight",)
    with pytest.raises(script.UsageError, match=".* differ by up to .*; vLLM has not taken all weights"):
        train(script, world)
    engine.lost = ("model.norm.weight",)
    with pytest.raises(script.UsageError, match=".* differ by up to .*; vLLM has not taken all weights"):
        train(script, world)


def test_a_response_that_was_broken_off_is_no_response(script, world, engine):
    """It has no stop token, and padding must not stand for one (B68): the run ends, and says where."""
    engine.aborts = True
    with pytest.raises(RuntimeError, match="vLLM broke a response off after 1 tokens: abort"):
        train(script, world)


def test_the_engine_has_room_for_the_longest_prompt(script, world, engine):
    """Of the held-out ones too: at its limit it would cut a response off."""
    train(script, world, total_steps=1)
    rows = [json.loads(line)["prompt"] for line in open(world / "data.jsonl")]
    assert engine.started[0].longest == max(map(len, rows)) + 6


def test_the_error_of_the_engine_is_weighed(script, world, engine):
    """An engine whose logits are off by a tenth: the update multiplies each token's loss by min(p / q, cap), p the
    trainer's and q the engine's probability (Espeholt et al. 2018; Yao et al. 2025). Held by the textbook tests of
    the loops; here: it reaches them, and the metric tells it."""
    engine.shift = 0.1
    small = train(script, world, total_steps=1, learning_rate=1e-9)["losses/mismatch"]
    engine.shift = 0.2
    large = train(script, world, total_steps=1, learning_rate=1e-9)["losses/mismatch"]
    assert 0.005 < small < large < 0.3


def test_what_cannot_be_is_refused(script, world, engine, monkeypatch):
    """In one sentence, before anything is loaded."""
    with pytest.raises(script.UsageError, match="--rollout vllm need --model"):
        script.Args(rollout="vllm")
    with pytest.raises(script.UsageError, match="--rollout vllm takes whole weights"):
        train(script, world, lora_rank=4)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(script.UsageError, match="--rollout vllm needs: pip install vllm"):
        train(script, world)
    assert not os.path.exists("runs") and not engine.started


def test_vllm_is_never_imported_unasked(script, world, engine):
    """--rollout torch starts no engine."""
    train(script, world, rollout="torch", total_steps=1)
    assert not engine.started


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("processes", [1, 2])
def test_on_the_real_engine(script, tmp_path, processes):
    """Two training steps sampled by vLLM: what it says of its tokens is what the trainer finds, also after a large
    update and between two processes."""
    world = make_world(script, tmp_path)
    flags = flags_of(script, world, run_name="x", total_steps=2)
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*launch, str(script.path), *script.words(**flags)], cwd=tmp_path, capture_output=True, text=True,
        timeout=570, env={"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = lines({"folder": tmp_path / "runs/x"})[1:]
    assert len(steps) == 2 and all(row["losses/mismatch"] < 1e-3 for row in steps)
