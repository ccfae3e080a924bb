"""The loop of grpo_rlhf.py: what it samples, scores, passes on and writes, on models small enough to check all."""

import copy
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import transformers
from torch.testing import assert_close

pytestmark = pytest.mark.setting("grpo_rlhf")
SMALL = dict(
    num_prompts=4, group_size=4, max_new_tokens=6, num_minibatches=2, update_epochs=2, total_steps=3, num_eval=6,
    eval_every=0, eval_samples=0, learning_rate=3e-3, warmup_steps=0, temperature=0.7, batch_tokens=60,
    row_tokens=24, device="cpu",
)  # fmt: skip
STOPS, MODELS, AGGREGATIONS = [1, 9], ["gpt2", "llama"], ["token", "sequence", "constant"]
CUTS = [(0, 1), (0, 8192), (20, 45), (1024, 8192)]  # --row-tokens, --batch-tokens
TRAPS = dict(top_k=2, top_p=0.8, temperature=0.3, do_sample=True, repetition_penalty=1.5, min_new_tokens=5)
REWARDS = r'''
import json, os, re
def write(prompts, completions, rewards):
    """Keep what was seen; end the run at the call that the file `stop` names."""
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([prompts, completions, rewards]) + "\n")
    if os.path.exists("stop"):
        how, left = open("stop").read().split()
        os.remove("stop")
        if left != "1":
            open("stop", "w").write(f"{how} {int(left) - 1}")
        elif how == "signal":
            os.kill(os.getpid(), 15)
        else:
            raise SystemExit(7)
    return rewards
def quarters(texts):
    return [sum(map(int, re.findall("[0-9]", text))) % 4 / 4 for text in texts]
def digits(prompts, texts, rows):
    return write(prompts, texts, [0.5 if p[0] == "7" else r for p, r in zip(prompts, quarters(texts))])
def few(prompts, texts, rows):
    return write(prompts, texts, [r if p[0] in "13" else 0.7 for p, r in zip(prompts, quarters(texts))])
def flat(prompts, texts, rows):
    return write(prompts, texts, [0.7] * len(texts))
def holes(prompts, texts, rows):
    return write(prompts, texts, [{0.25: None, 0.5: float("nan")}.get(r, r) for r in quarters(texts)])
def five(prompts, texts, rows):
    return write(prompts, texts, [float(text[:1] == "5") for text in texts])
'''


@pytest.fixture(scope="session")
def world(script, tmp_path_factory):
    """Folders of two random models (absolute and rotary positions) whose generation configs are full of traps, a
    data set of prompts of different lengths, a file of reward functions."""
    root = tmp_path_factory.mktemp("world")
    common = dict(vocab_size=13, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    gpt2 = dict(n_embd=24, n_layer=2, n_head=2, n_positions=64, initializer_range=0.25)
    llama = dict(hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    llama |= dict(max_position_embeddings=64, initializer_range=0.3)
    dropout = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    tokenizer, traps = script.digit_tokenizer(), {**TRAPS, "eos_token_id": STOPS}
    for name, config in (
        ("gpt2", transformers.GPT2Config(**common, **gpt2)),
        ("dropout", transformers.GPT2Config(**common, **gpt2, **dropout)),
        ("llama", transformers.LlamaConfig(**common, **llama)),
    ):
        torch.manual_seed(5)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer.pad_token = "<pad>" if name == "llama" else "<eos>"
        tokenizer.save_pretrained(root / name)
        (root / name / "generation_config.json").write_text(json.dumps(traps))
    prompts = [f"{first}{'1234567'[: i % 6]}{i:02d}="[i % 3 :] for i, first in enumerate("1234567" * 4)]
    prompts = [p if p[0] not in "09" else "8" + p for p in prompts] + [f"9{i}=" for i in range(6)]
    rows = [json.dumps({"prompt": p, "answer": p[0]}) + "\n" for p in dict.fromkeys(prompts)]
    (root / "data.jsonl").write_text("".join(rows))
    (root / "rewards.py").write_text(REWARDS)
    return root


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def arguments(script, world, model="llama", reward="digits", **flags):
    """Small settings; fails (ours) or skips (a copy) if a flag is gone."""
    flags = {"model": str(world / model), "dataset": str(world / "data.jsonl"), **SMALL, **flags}
    flags["reward"] = f"{world / 'rewards.py'}:{reward}"
    if gone := set(flags) - set(script.Args.__dataclass_fields__):
        stop = pytest.fail if script.own else pytest.skip
        stop(f"{script.path.name} has no flag {', '.join(sorted(gone))}")
    return script.Args(**flags)


def train(script, world, **flags):
    return script.main(arguments(script, world, **flags))


def load(script, world, name):
    tokenizer, model = script.load_model(str(world / name))
    return tokenizer, model.eval()


def seen(held_out=False):
    """What the reward functions saw and gave, call by call: prompts, completions, rewards (NaN for None)."""
    calls = [json.loads(line) for line in open("seen.jsonl")]
    nan = lambda rewards: [math.nan if r is None else r for r in rewards]
    return [(p, c, nan(r)) for p, c, r in calls if (p[0][0] == "9") == held_out]


def lines(out, kind="metrics"):
    """metrics.jsonl without the numbers that depend on the clock."""
    rows = [json.loads(line) for line in open(Path(out["folder"]) / f"{kind}.jsonl")]
    return [{k: v for k, v in row.items() if "time/" not in k and k != "charts/TPS"} for row in rows]


def checkpoint(out):
    return torch.load(Path(out["folder"]) / "checkpoint.pt", weights_only=True)


def snapshot(x):
    if isinstance(x, dict):
        return {key: snapshot(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(snapshot, x))
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x)
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture
def record(script, monkeypatch):
    """record(*names) notes (name, inputs, result) of every call, and ("step", ...) of the optimiser, in order."""
    events, step = [], torch.optim.AdamW.step

    def start(*names):
        for name in names:
            function = getattr(script, name)

            def recorder(*inputs, function=function, name=name):
                before = snapshot(inputs)
                result = function(*inputs)
                events.append((name, before, snapshot(result)))
                return result

            monkeypatch.setattr(script.module, name, recorder)
        note = lambda self, *a: events.append(("step", self.param_groups[0]["lr"], None)) or step(self, *a)
        monkeypatch.setattr(torch.optim.AdamW, "step", note)
        return events

    return start


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def cut(tokens, stops):
    """Up to and with the first stop id."""
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


@torch.no_grad()
def brute(model, prompt, response, temperature):
    """The distribution of each token by a forward of its own: no padding, no cache, no packing. -> (n, V)."""
    rows = [model(torch.tensor([prompt + response[:t]])).logits[0, -1] for t in range(len(response))]
    return (torch.stack(rows).double() / temperature).log_softmax(-1)


def plain(model, batch, i, temperature):
    """Log-probabilities of response i, alone and unpadded, with gradient."""
    prompt = batch["prompts"][i // SMALL["group_size"]]
    response = batch["tokens"][i][batch["mask"][i]]
    logits = model(torch.tensor([prompt + response.tolist()])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, response[:, None])[:, 0]


def reference_advantages(rewards, size=4):
    out = []
    for group in (rewards[i : i + size] for i in range(0, len(rewards), size)):
        known = torch.tensor([r for r in group if r == r])
        spread = known.std() if len(known) > 1 else 0.0
        out += [((r - known.mean()) / (spread + 1e-4)).item() if r == r and spread > 0 else 0.0 for r in group]
    return torch.tensor(out)


def reference_loss(model, batch, samples, args):
    """The loss of one optimiser step, written out: a loop over unpadded responses."""
    total, tokens = 0.0, sum(batch["mask"][i].sum() for i in samples)
    for i in samples:
        logp, keep, adv = plain(model, batch, i, args.temperature), batch["mask"][i], batch["advantages"][i]
        old, sampled = batch["old_logps"][i][keep], batch["sampled"][i][keep]
        ratio = (logp - old).exp()
        if args.surrogate == "gspo":
            ratio = (logp - old).mean().exp().expand_as(logp)
        clipped = torch.clamp(ratio, 1 - args.clip_low, 1 + args.clip_high)
        loss = {
            "cispo": -ratio.detach().clamp(max=args.cispo_max) * adv * logp,
            "reinforce": -adv * logp,
        }.get(args.surrogate, -torch.minimum(ratio * adv, clipped * adv))
        loss = loss * (old - sampled).exp().clamp(max=args.importance_cap)
        if "ref_logps" in batch and args.kl_form != "reward":
            d = batch["ref_logps"][i][keep] - logp
            loss = loss + args.kl_coef * (d.exp() - 1 - d) * (ratio if args.kl_form == "k3_unbiased" else 1.0)
        share = {"token": tokens, "sequence": len(samples) * len(logp), "constant": len(samples) * args.max_new_tokens}
        total = total + loss.sum() / share[args.aggregation]
    return total


# ---- sampling ----


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_sampled_logps_are_those_of_a_forward_for_each_token(script, world, name, temperature):
    """Left-padded prompts, forked caches, rows that leave the batch and a checkpoint's generation config change no
    log-probability (B59, B61, B62, B64, B68, B103, OpenRLHF/OpenRLHF #217, huggingface/trl #235, #2824: B118)."""
    tokenizer, model = load(script, world, name)
    prompts = [tokenizer(text).input_ids for text in ("3=", "1234567=", "616=6", "<eos>5=")]
    tokens, logps, entropies = script.generate(model, prompts, 6, 7, temperature, STOPS, generator())
    responses = [cut(row, STOPS) for row in tokens.tolist()]
    for i, response in enumerate(responses):
        every = brute(model, prompts[i // 6], response, temperature)
        right, n = every.gather(1, torch.tensor(response)[:, None])[:, 0].float(), len(response)
        assert_close(logps[i, :n], right, atol=2e-5, rtol=1e-5)
        assert_close(entropies[i, :n], -(every.exp() * every).sum(1).float(), atol=2e-5, rtol=1e-5)
    assert len(set(map(len, responses))) > 3 and {r[-1] for r in responses} >= set(STOPS)
    assert all(len(set(map(tuple, responses[i : i + 6]))) > 2 for i in range(0, 24, 6))  # B118


@pytest.mark.parametrize("name, temperature", [("gpt2", 0.7), ("llama", 1.6)])
def test_sampled_frequencies_are_the_scored_distribution(script, world, name, temperature):
    """Neither top-k, penalties or a least length of the checkpoint nor the temperature part the sampled from the
    scored distribution (B61, huggingface/trl #1017, #6789; B115, #4159): chi-square over two tokens."""
    tokenizer, model = load(script, world, name)
    prompt, n = tokenizer("62=").input_ids, 6000
    tokens, logps, _ = script.generate(model, [prompt], n, 2, temperature, STOPS, generator(1))
    first = brute(model, prompt, [0], temperature)[0].exp()
    second = torch.stack([brute(model, prompt, [a, 0], temperature)[1].exp() for a in range(13)])
    goes_on = torch.tensor([a not in STOPS for a in range(13)])
    second = (first[:, None] * second)[goes_on].sum(0)
    for drawn, expected in ((tokens[:, 0], first * n), (tokens[goes_on[tokens[:, 0]], 1], second * n)):
        counts = torch.bincount(drawn, minlength=13).double()
        assert ((counts - expected).square() / expected).sum() < 45  # 12 degrees of freedom: p = 1e-5
    assert first[STOPS].min() > 0.005 and (first > 0.02).sum() > 4  # the probe would see it


@pytest.mark.parametrize("name", MODELS)
def test_greedy_responses_do_not_depend_on_the_batch(script, world, name):
    """Temperature 0 takes the likeliest token, and each response is that of a run of its own (B62, B71)."""
    tokenizer, model = load(script, world, name)
    prompts = [tokenizer(f"{'98765432'[: 1 + i % 6]}{i}=").input_ids for i in range(16)]
    stops, ends = [1, 5, 7, 9, 11], set()
    tokens, logps, _ = script.generate(model, prompts, 1, 8, 0.0, stops, generator())
    for i, prompt in enumerate(prompts):
        alone, its_logps, _ = script.generate(model, [prompt], 1, 8, 0.0, stops, generator())
        response, n = cut(tokens[i].tolist(), stops), len(cut(tokens[i].tolist(), stops))
        every = brute(model, prompt, response, 1.0)
        assert response == cut(alone[0].tolist(), stops) == every.argmax(1).tolist()
        assert_close(logps[i, :n], its_logps[0, :n], atol=2e-5, rtol=1e-5)
        ends.add(n)
    assert len(ends) > 2


@pytest.mark.parametrize("name, stop, stops", [("gpt2", None, STOPS), ("llama", "3", [*STOPS, 6])])
def test_every_stop_id_ends_a_response_and_is_trained(script, world, record, name, stop, stops):
    """All stop ids of tokenizer, model and --stop end a response; the stop token is in the mask, nothing after it, also
    where the padding token is the stop token (B68, B103, verl-project/verl #213, huggingface/trl #6357)."""
    events = record("update", "surrogate")
    train(script, world, model=name, stop=stop, row_tokens=0, batch_tokens=1)
    texts = [text for _, texts, _ in seen() for text in texts]
    ended = set()
    for batch in (inputs[2] for kind, inputs, _ in events if kind == "update"):
        for tokens, mask in zip(batch["tokens"].tolist(), batch["mask"]):
            response = cut(tokens[: SMALL["max_new_tokens"]], stops)
            assert mask.tolist() == [t < len(response) for t in range(len(tokens))]
            ended.add(response[-1])
            shown = response[:-1] if response[-1] in stops else response
            hidden = (0,) if name == "llama" else ()  # the padding token is not shown
            assert texts.pop(0) == "".join("  ="[t] if t < 3 else str(t - 3) for t in shown if t not in hidden) or 0 in shown
    assert ended >= set(stops) and not texts
    trained = {int(inputs[4].sum()) for kind, inputs, _ in events if kind == "surrogate"}
    assert trained == set(range(1, 7))
