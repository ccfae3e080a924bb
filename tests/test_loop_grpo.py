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
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing import assert_close

pytestmark = pytest.mark.setting("grpo_rlhf")
SMALL = dict(
    num_prompts=4, group_size=4, max_new_tokens=6, num_minibatches=2, update_epochs=2, total_steps=3, num_eval=6,
    eval_every=0, eval_samples=0, learning_rate=3e-3, warmup_steps=0, temperature=0.7, batch_tokens=60,
    row_tokens=16, device="cpu",
)  # fmt: skip
STOPS, MODELS, AGGREGATIONS = [1, 9], ["gpt2", "llama"], ["token", "sequence", "constant"]
CUTS = [(0, 1), (0, 8192), (12, 45), (1024, 8192)]  # --row-tokens, --batch-tokens
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
    return [sum(map(int, re.findall("[0-9]", text))) % 5 / 4 for text in texts]
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
    common = dict(vocab_size=13, bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False)
    gpt2 = dict(n_embd=24, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    llama = dict(hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    llama |= dict(max_position_embeddings=64, initializer_range=0.25)
    dropout = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    tokenizer, traps = script.digit_tokenizer(), {**TRAPS, "eos_token_id": STOPS}
    for name, config in (
        ("gpt2", transformers.GPT2Config(**common, **gpt2)),
        ("dropout", transformers.GPT2Config(**common, **gpt2, **dropout)),
        ("llama", transformers.LlamaConfig(**common, **llama)),
    ):
        torch.manual_seed(4 if name == "llama" else 0)
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
    return script.Args(**script.flags(**flags))


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


def joined(path):
    """The rows of metrics.jsonl, those of one step as one."""
    rows = {}
    for row in map(json.loads, open(path)):
        rows[row["step"]] = rows.get(row["step"], {}) | row
    return list(rows.values())


def lines(out, kind="metrics"):
    """metrics.jsonl, or completions.jsonl, without the numbers that depend on the clock."""
    path = Path(out["folder"]) / f"{kind}.jsonl"
    rows = joined(path) if kind == "metrics" else [json.loads(line) for line in open(path)]
    clock = lambda k: k.startswith("time/") or k in ("charts/TPS", "charts/SPS")
    return [{k: v for k, v in row.items() if not clock(k)} for row in rows]


def checkpoint(out):
    return torch.load(Path(out["folder"]) / "checkpoint.pt", weights_only=True)


def resume(script, folder, **flags):
    return script.main(script.command_line(script.words(resume=folder, device="cpu", **flags)))


def snapshot(x):
    if isinstance(x, dict):
        return {key: snapshot(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(snapshot, x))
    if isinstance(source := getattr(x, "source", x), torch.nn.Module):  # of a sampler, what it samples from
        return copy.deepcopy(source)
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture
def record(script, monkeypatch):
    """record(*names) notes (name, inputs, result) of every call, and ("step", learning rate, class) of the optimiser, in
    order."""
    events = []
    note = lambda optimizer, *_: events.append(
        ("step", optimizer.param_groups[0]["lr"], type(optimizer).__name__)
    )
    hook = register_optimizer_step_pre_hook(note)

    def start(*names):
        for name in names:
            function = script.watch(name)

            def recorder(*inputs, function=function, name=name, **named):
                before = snapshot(tuple(script.as_ours(function, inputs, named)))
                result = function(*inputs, **named)
                events.append((name, before, snapshot(result)))
                return result

            monkeypatch.setattr(script.module, name, recorder)
        return events

    yield start
    hook.remove()


def inputs_of(events, name):
    return [inputs for kind, inputs, _ in events if kind == name]


def uses_adamw(script, events):
    kinds = {result for kind, _, result in events if kind == "step"}
    if kinds and kinds != {"AdamW"}:
        script.gone(f"has another optimiser, {', '.join(sorted(kinds))}")


def responses(groups):
    """The samples of some groups of four."""
    return [4 * int(g) + j for g in groups for j in range(4)]


def close(a, b):
    return a.shape == b.shape and (a - b).abs().max() < 1e-4


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sampler(script, model, tokenizer, stops, most):
    """Samples up to `most` tokens from the model."""
    task = script.Task(tokenizer=tokenizer, stops=stops, rows=[], held_out=[], rewards={})
    return script.Sampler(model, task, script.Args(max_new_tokens=most), generator())


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
    for i in range(0, len(rewards), size):
        known = torch.tensor([r for r in rewards[i : i + size] if r == r])
        scale = 1 / (known.std() + 1e-4) if len(known) > 1 and known.std() > 0 else 0.0
        out += [(r - known.mean().item()) * scale if r == r else 0.0 for r in rewards[i : i + size]]
    return torch.tensor(out)


def reference_loss(model, batch, samples, args):
    """The loss of one optimiser step, written out: a loop over unpadded responses."""
    total, tokens = 0.0, sum(batch["mask"][i].sum() for i in samples)
    for i in samples:
        logp, keep, adv = plain(model, batch, i, args.temperature), batch["mask"][i], batch["advantages"][i]
        old, sampled = batch["old_logps"][i][keep], batch["sampled"][i][keep]
        ratio = (logp - old).exp()
        pull = ratio if args.kl_form == "k3_unbiased" else 1.0
        if args.surrogate == "gspo":  # the sequence's ratio, each token's gradient
            ratio = (logp - old).mean().exp().detach() * (logp - logp.detach()).exp()
        clipped = torch.clamp(ratio, 1 - args.clip_low, 1 + args.clip_high)
        loss = {
            "cispo": -ratio.detach().clamp(max=args.cispo_max) * adv * logp,
            "reinforce": -adv * logp,
        }.get(args.surrogate, -torch.minimum(ratio * adv, clipped * adv))
        loss = loss * (old - sampled).exp().clamp(max=args.importance_cap)
        if "ref_logps" in batch and args.kl_form != "reward":
            d = batch["ref_logps"][i][keep] - logp
            loss = loss + args.kl_coef * (d.exp() - 1 - d) * pull
        size = {"token": tokens / len(samples), "sequence": len(logp), "constant": args.max_new_tokens}
        total = total + loss.sum() / (len(samples) * size[args.aggregation])
    return total


# ---- sampling ----


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_sampled_logps_are_those_of_a_forward_for_each_token(script, world, name, temperature):
    """Left-padded prompts, forked caches, rows that leave the batch and a checkpoint's generation config change no
    log-probability (B59, B61, B62, B64, B68, B103, OpenRLHF/OpenRLHF #217, huggingface/trl #235, #2824: B118)."""
    tokenizer, model = load(script, world, name)
    prompts = [tokenizer(text).input_ids for text in ("3=", "1234567=", "616=6", "<eos>5=")]
    draws = sampler(script, model, tokenizer, STOPS, 7)
    tokens, logps, entropies = draws.generate(prompts, 6, temperature)
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
    draws = sampler(script, model, tokenizer, STOPS, 2)
    tokens, logps, _ = draws.generate([prompt], n, temperature, generator(1))
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
    draws = sampler(script, model, tokenizer, stops, 8)
    tokens, logps, _ = draws.generate(prompts, 1, 0.0)
    for i, prompt in enumerate(prompts):
        alone, its_logps, _ = draws.generate([prompt], 1, 0.0)
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
    events = record("update_policy", "surrogate")
    train(script, world, model=name, stop=stop, row_tokens=0, batch_tokens=1)
    texts = [text for _, texts, _ in seen() for text in texts]
    ended = set()
    for batch in (inputs[2] for inputs in inputs_of(events, "update_policy")):
        for tokens, mask in zip(batch["tokens"].tolist(), batch["mask"]):
            response = cut(tokens[: SMALL["max_new_tokens"]], stops)
            assert mask.tolist() == [t < len(response) for t in range(len(tokens))]
            ended.add(response[-1])
            shown = response[:-1] if response[-1] in stops else response
            names = ["", "<eos>", "=", *"0123456789"]  # <pad> is not shown
            assert texts.pop(0) == "".join(names[token] for token in shown)
    assert ended >= set(stops) and not texts
    assert len({int(inputs[4].sum()) for inputs in inputs_of(events, "surrogate")}) > 4


# ---- scoring and the gradient ----


def made_batch(script, world, name, **flags):
    """Random responses of random lengths with old, sampled and reference log-probabilities off the policy, one flat
    group and one unscored response: what `update_policy` works on, made without sampling."""
    flags = dict(max_new_tokens=7, max_grad_norm=1e9, update_epochs=1) | script.new_terms_off() | flags
    args = arguments(script, world, model=name, **flags)
    tokenizer, model = load(script, world, name)
    g, shape = generator(3), (16, 7)
    lengths = torch.randint(1, 8, (16,), generator=g)
    tokens = torch.randint(2, 9, shape, generator=g)
    tokens[lengths < 7, lengths[lengths < 7] - 1] = 1
    batch = {"mask": torch.arange(7) < lengths[:, None], "tokens": tokens}
    batch["prompts"] = [tokenizer(text).input_ids for text in ("3=", "7654321=", "616=6", "45=")]
    with torch.no_grad():
        rows = [plain(model, batch, i, args.temperature) for i in range(16)]
    truth = torch.zeros(shape).masked_scatter(batch["mask"], torch.cat(rows))
    noise = lambda size: torch.randn(shape, generator=g) * size * batch["mask"]
    batch["old_logps"] = truth + noise(0.3)
    batch["sampled"] = batch["old_logps"] + noise(0.6)
    batch["advantages"] = torch.randn(16, generator=g)
    batch["advantages"][4:8] = batch["advantages"][9] = 0.0
    if args.kl_coef:
        batch["ref_logps"] = truth + noise(0.5)
    batch["needed"] = batch["advantages"] != 0
    if args.kl_coef and args.kl_form != "reward":
        batch["needed"][:] = True
    return args, model, batch, truth


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_unpadded_forwards(script, world, name):
    """No packing, padding, micro-batch, order or company changes a log-probability, nor does what stands behind the stop
    token (B59, B62, B64, B82, B85); the others are 0."""
    args, model, batch, truth = made_batch(script, world, name)
    everyone = responses(range(4))
    prompt, response = batch["prompts"][1], batch["tokens"][6][batch["mask"][6]].tolist()
    every = brute(model, prompt, response, 0.7)
    assert_close(truth[6, : len(response)], every.gather(1, torch.tensor(response)[:, None])[:, 0].float())
    for args.row_tokens, args.batch_tokens in CUTS:
        for samples in (everyone, [1, 2, 6, 11], [15], []):
            scored = script.score_all(model, batch, samples, args)
            kept = torch.zeros(16, 1).index_fill_(0, torch.tensor(samples, dtype=torch.long), 1.0)
            assert_close(scored, truth * kept, atol=2e-5, rtol=1e-5)
        junk = batch | {"tokens": torch.where(batch["mask"], batch["tokens"], 12)}
        assert_close(script.score_all(model, junk, everyone, args), truth, atol=2e-5, rtol=1e-5)
    order = responses([2, 0, 3, 1])
    moved = {key: batch[key][order] for key in ("tokens", "mask", "sampled")}
    moved["prompts"] = [batch["prompts"][i] for i in (2, 0, 3, 1)]
    assert_close(script.score_all(model, moved, everyone, args), truth[order], atol=2e-5, rtol=1e-5)


def test_packed_rows_stay_within_the_positions(script, world):
    """A row of many responses is longer than the model's table of positions, no position in it is, padding included."""
    flags = dict(model="gpt2", group_size=64, row_tokens=1024, batch_tokens=8192, total_steps=1)
    assert train(script, world, **flags)["losses/mismatch"] < 1e-5


class Gradients:
    """An optimiser that keeps the gradient of each step and moves nothing."""

    def __init__(self, model):
        self.model, self.steps = model, []

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        self.steps.append(torch.cat([part.flatten() for part in parts]))


LOSSES = [
    ("gpt2", dict(aggregation="token")),
    ("llama", dict(aggregation="sequence", kl_coef=0.3, kl_form="k3")),
    ("llama", dict(aggregation="constant", kl_coef=0.3, kl_form="k3_unbiased")),
    ("llama", dict(aggregation="token", kl_coef=0.3, kl_form="reward")),
    ("llama", dict(surrogate="gspo", aggregation="sequence", clip_low=0.05, clip_high=0.1)),
    ("gpt2", dict(surrogate="cispo", aggregation="token", cispo_max=1.1, kl_coef=0.1)),
    ("llama", dict(surrogate="reinforce", aggregation="constant", num_minibatches=1)),
]


@pytest.mark.parametrize("name, flags", LOSSES, ids=str)
def test_gradient_of_a_step_is_that_of_a_loop_over_responses(script, world, name, flags):
    """The gradient of each optimiser step is that of the loss written out, however it is cut into micro-batches and
    rows, with or without the samples of advantage 0 (B104, huggingface/trl #2647; B106, B107, B109, B110, B116)."""
    args, model, batch, _ = made_batch(script, world, name, **flags)
    expected = Gradients(model)
    for groups in script.minibatches(4, args.num_minibatches, generator(0)):
        expected.zero_grad()
        reference_loss(model, batch, responses(groups), args).backward()
        expected.step()
    for args.row_tokens, args.batch_tokens in CUTS:
        for needed in (batch["needed"], torch.ones(16, dtype=torch.bool)):
            found = Gradients(model)
            script.update_policy(model, found, batch | {"needed": needed}, generator(0), args)
            assert len(found.steps) == args.num_minibatches
            for a, b in zip(found.steps, expected.steps):
                assert_close(a, b, atol=1e-5, rtol=1e-4)
                assert b.abs().max() > 0.01
    args.gradient_checkpointing = True
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = Gradients(model)
    script.update_policy(model, found, batch, generator(0), args)
    assert_close(found.steps[0], expected.steps[0], atol=1e-5, rtol=1e-4)
    assert not model.training


# ---- what the loop passes on ----


def acting_weights(events):
    """(weights before the first update, batch, events of the update) of each training step."""
    starts = [i for i, event in enumerate(events) if event[0] == "prepare"]
    for first, last in zip(starts, [*starts[1:], len(events)]):
        part = events[first:last]
        yield events[first][1][0], inputs_of(part, "update_policy")[0][2], part


@pytest.mark.parametrize("advantage", ["grpo", "drgrpo"])
def test_every_response_learns_with_its_own_advantage(script, world, record, advantage):
    """Each group is in exactly one minibatch of an epoch; log-probabilities, mask and advantage of a row belong to one
    response, and the advantage is that of the rewards that the function gave it (B82, verl-project/verl #1440); the
    counts are those of the whole minibatch, flat groups included (B104, B107); the ratio is exactly 1 before the first
    optimiser step of a batch and moves afterwards (B112, B113, huggingface/trl #3493)."""
    events = record("prepare", "update_policy", "surrogate", "aggregate")
    train(script, world, advantage=advantage, total_steps=4, learning_rate=1e-2)
    flat_ones = 0
    for (model, batch, part), (*_, rewards) in zip(acting_weights(events), seen(), strict=True):
        adv = reference_advantages(rewards)
        if advantage == "drgrpo":
            groups = torch.tensor(rewards).view(4, 4)
            adv = (groups - groups.mean(1, keepdim=True)).flatten()
        with torch.no_grad():
            old = [plain(model, batch, i, 0.7) for i in range(16)]
        for i, row in enumerate(old):
            assert_close(batch["sampled"][i][: len(row)], row, atol=1e-4, rtol=1e-4)
        flat = {g for g in range(4) if adv[4 * g : 4 * g + 4].abs().max() < 1e-6}
        flat_ones += len(flat)
        steps, number = [[]], 0
        for kind, inputs, _ in part:
            if kind == "surrogate":
                _, logp, stored, given, mask, *rest = inputs
                assert rest == [0.2, 0.28, 5.0]
                for row, its_logp, keep, its_adv in zip(stored, logp, mask, given):
                    fits = [i for i in range(16) if close(old[i], row[keep]) and i not in steps[-1]]
                    fits = [i for i in fits if abs(adv[i] - its_adv) < 2e-3]
                    assert fits, "no response has this advantage and these log-probabilities"
                    steps[-1].append(fits[0])
                    number += 1
                    if len(steps) == 1:
                        assert_close(its_logp[keep], row[keep], atol=1e-5, rtol=1e-5)
                if len(steps) > 1:
                    assert (logp - stored)[mask].abs().max() > 1e-3
            if kind == "aggregate":
                steps[-1].append(tuple(int(x) for x in inputs[3:]))
            if kind == "step":
                steps.append([])
        steps = [step for step in steps if step]
        if len(flat) > 1:
            continue  # which flat group is where cannot be told from outside
        whole = []
        for step in steps:
            counts = {x for x in step if isinstance(x, tuple)}
            groups = {x // 4 for x in step if isinstance(x, int)}
            groups |= flat if len(groups) == 1 else set()
            tokens = sum(len(old[4 * g + j]) for g in groups for j in range(4))
            assert counts == {(tokens, 8, 6)}
            whole += sorted(groups)
        assert sorted(whole[:4]) == sorted(whole[4:]) == [0, 1, 2, 3]
        assert number == 2 * (16 - (adv.abs() < 1e-6).sum())
    assert flat_ones


def test_one_update_a_batch_is_on_policy(script, world, record):
    """With one epoch and one minibatch old = new by construction: no scoring pass, ratio 1, the weight of the sampler's
    rounding near 1 (B113, B115, B116)."""
    events = record("surrogate", "score_all")
    out = train(script, world, update_epochs=1, num_minibatches=1, self_checks=False)
    calls = inputs_of(events, "surrogate")
    assert len(calls) > 3 and all(torch.equal(c[1], c[2]) for c in calls)
    assert not inputs_of(events, "score_all")
    assert out["losses/mismatch"] < 1e-5 and out["losses/approx_kl"] == 0 and out["losses/grad_norm"] > 0


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("form", ["k3_unbiased", "k3", "reward"])
def test_reference_is_the_starting_policy(script, world, record, form, lora_rank):
    """The reference is the frozen starting policy in every step, with adapters too (B88, huggingface/trl #1340, #495):
    KL 0 first, then not; kl_loss gets new, old and reference, or the reward loses coef x sum of k1."""
    if lora_rank:
        pytest.importorskip("peft")
    events = record("prepare", "update_policy", "kl_loss", "group_advantages", "pass_rates")
    out = train(script, world, kl_coef=0.3, kl_form=form, lora_rank=lora_rank, learning_rate=1e-2)
    start = load(script, world, "llama")[1]
    batches, given = list(acting_weights(events)), inputs_of(events, "group_advantages")
    for (model, batch, part), (*_, rewards), (adjusted, *_) in zip(batches, seen(), given, strict=True):
        with torch.no_grad():
            ref, old = ([plain(m, batch, i, 0.7) for i in range(16)] for m in (start, model))
        for i in range(16):
            assert_close(batch["ref_logps"][i][batch["mask"][i]], ref[i], atol=2e-5, rtol=1e-4)
            assert_close(batch["old_logps"][i][batch["mask"][i]], old[i], atol=2e-5, rtol=1e-4)
        k1 = torch.stack([(o - r).sum() for o, r in zip(old, ref)])
        assert (k1.abs().max() < 1e-4) if model is batches[0][0] else (k1.abs().max() > 0.1)
        penalty = 0.3 * k1 if form == "reward" else 0.0
        assert_close(adjusted, torch.tensor(rewards) - penalty, atol=1e-4, rtol=1e-4)
        pulls = inputs_of(part, "kl_loss")
        assert sum(len(logp) for _, logp, *_ in pulls) == (0 if form == "reward" else 32)  # flat groups too
        for kind, _, *rows in pulls:
            for its_old, its_ref in zip(*rows):
                keep = its_ref != 0
                assert kind == form and any(
                    close(ref[i], its_ref[keep]) and close(old[i], its_old[keep]) for i in range(16)
                )
    trained, final = checkpoint(out)["parts"]["model"], events[-1][1][0]
    if lora_rank:
        assert trained and all("lora_" in name for name in trained)
        short = lambda name: name.replace("base_model.model.", "").replace(".base_layer", "")
        base = {short(name): p for name, p in final.named_parameters()}
        assert all(torch.equal(p, base[name]) for name, p in start.named_parameters())
        assert sum(p.abs().max() > 0 for n, p in trained.items() if "lora_B" in n) == 14
    else:
        assert set(trained) == {n for n, _ in start.named_parameters()}


@pytest.mark.parametrize("norm", [0.02, 1e6])
def test_update_equals_the_textbook(script, world, record, norm):
    """Three training steps of two epochs and two minibatches (order, learning rate with warm-up and decay, clipping of the
    norm, AdamW) move the weights as an independent implementation does (B25, B31, B107), with the weights of terms that
    are new in a copy (flags named ..._coef) at 0."""
    events = record("update_policy")
    flags = dict(total_steps=3, warmup_steps=2, anneal_lr=True, max_grad_norm=norm, learning_rate=2e-3)
    flags |= script.new_terms_off()
    out = train(script, world, **flags)
    uses_adamw(script, events)
    args, model = arguments(script, world, **flags), load(script, world, "llama")[1]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    shuffle = torch.Generator().manual_seed(int(script.streams(1)[2].generate_state(1)[0]))
    batches = [inputs[2] for inputs in inputs_of(events, "update_policy")]
    rates, moved = [1e-3, 2e-3 * 2 / 3, 2e-3 / 3], []
    assert inputs_of(events, "step") == pytest.approx([rate for rate in rates for _ in range(4)])
    for batch, (*_, rewards), optimizer.param_groups[0]["lr"] in zip(batches, seen(), rates):
        batch["advantages"] = reference_advantages(rewards)
        with torch.no_grad():
            for i in range(16):
                batch["old_logps"][i][batch["mask"][i]] = plain(model, batch, i, 0.7)
        for _ in range(2):
            for groups in torch.randperm(4, generator=shuffle).tensor_split(2):
                optimizer.zero_grad()
                reference_loss(model, batch, responses(groups), args).backward()
                moved.append(torch.nn.utils.clip_grad_norm_(model.parameters(), norm).item())
                optimizer.step()
    trained = checkpoint(out)["parts"]["model"]
    error = torch.cat([(trained[name] - p).abs().flatten() for name, p in model.named_parameters()])
    assert (error < 2e-5).float().mean() > 0.995 and error.mean() < 2e-6, error.sort().values[-20:]
    assert out["losses/grad_norm"] == pytest.approx(sum(moved[-4:]) / 4, rel=1e-3) and min(moved) > 0.02


# ---- rewards and the filter ----


def test_dynamic_sampling_keeps_whole_groups(script, world, record):
    """Groups with equal rewards are dropped as a whole, rounds go on until there are enough others or --sampling-rounds
    are over, and the reward reported is that of all that was sampled (NVIDIA-NeMo/RL #3469)."""
    events = record("update_policy")
    out = train(script, world, reward="few", sampling_rounds=3, total_steps=6)
    calls, ends = seen(), set()
    for (_, _, batch, *_), row in zip(inputs_of(events, "update_policy"), lines(out)[1:], strict=True):
        kept, everything, number = [], [], 0
        while len(kept) < 4 and number < 3:
            number += 1
            prompts, _, rewards = calls.pop(0)
            everything += rewards
            groups = [(prompts[i], rewards[i : i + 4]) for i in range(0, 16, 4)]
            kept += [(prompt, group) for prompt, group in groups if len(set(group)) > 1]
        ends.add((number, len(kept) >= 4))
        kept = kept[:4]
        assert batch["rewards"].tolist() == pytest.approx([r for _, group in kept for r in group])
        assert batch["prompts"] == [script.digit_tokenizer()(prompt).input_ids for prompt, _ in kept]
        assert len(batch["tokens"]) == len(batch["mask"]) == len(batch["sampled"]) == 4 * len(kept)
        assert row["charts/rounds"] == number
        assert row["charts/reward"] == pytest.approx(sum(everything) / len(everything))
    assert not calls and (3, False) in ends and len(ends) > 1


@pytest.mark.parametrize("sampling_rounds", [1, 3])
def test_equal_rewards_move_nothing(script, world, record, sampling_rounds):
    """A batch of flat groups takes no optimiser step, not even on momentum, and the run goes on (B85)."""
    events = record("update_policy")
    out = train(script, world, reward="flat", sampling_rounds=sampling_rounds)
    assert not inputs_of(events, "step") and len(events) == 3
    start = dict(load(script, world, "llama")[1].named_parameters())
    assert all(torch.equal(p, start[name]) for name, p in checkpoint(out)["parts"]["model"].items())
    assert [row["charts/rounds"] for row in lines(out)[1:]] == [sampling_rounds] * 3
    assert out["charts/flat_groups"] == 1 and out["losses/grad_norm"] == 0


def test_overlong_penalty_reaches_the_advantages(script, world, record):
    """The length penalty is added to what the functions gave, before the advantages, and not to the reported reward."""
    events = record("group_advantages", "update_policy")
    out = train(script, world, overlong_buffer=0.5)
    calls = zip(
        inputs_of(events, "group_advantages"), inputs_of(events, "update_policy"), seen(), lines(out)[1:]
    )
    for (found, *_), (_, _, batch, *_), (*_, rewards), row in calls:
        penalty = -(batch["mask"].sum(1) - 3).clamp(0, 3) / 3
        assert penalty.min() == -1 and penalty.max() == 0
        assert_close(found, torch.tensor(rewards) + penalty)
        assert row["charts/reward"] == pytest.approx(sum(rewards) / 16)


def test_unscored_responses_have_no_advantage(script, world, record):
    """None or NaN for a response: advantage 0 for it, the others' group statistics without it (B85)."""
    events = record("update_policy")
    out = train(script, world, reward="holes")
    holes = 0
    for (_, _, batch, *_), (*_, rewards) in zip(inputs_of(events, "update_policy"), seen(), strict=True):
        assert_close(batch["advantages"], reference_advantages(rewards), atol=1e-4, rtol=1e-4)
        holes += sum(r != r for r in rewards)
    assert holes > 5 and math.isfinite(out["charts/reward"]) and out["charts/unscored"] > 0


# ---- runs ----


def equal_runs(a, b):
    """Weights, optimiser state, random streams, metrics and completions agree to the bit."""
    inner = lambda x: x.values() if isinstance(x, dict) else x
    flat = lambda x: [z for y in inner(x) for z in flat(y)] if isinstance(x, (dict, list)) else [x]
    states = [{k: v for k, v in checkpoint(out).items() if k != "args"} for out in (a, b)]
    for x, y in zip(*map(flat, states), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert lines(a) == lines(b) and lines(a, "completions") == lines(b, "completions")


KEYS = """losses/policy_loss losses/kl_loss losses/approx_kl losses/clipfrac losses/mismatch losses/ref_kl losses/grad_norm
losses/entropy charts/reward charts/flat_groups charts/response_length charts/eos_share charts/unscored charts/tokens
charts/rounds charts/learning_rate charts/TPS charts/SPS time/rollout time/score time/update time/cpu"""


def test_same_seed_same_run(script, world):
    """Two runs of one seed agree to the bit, another seed does not; evaluation draws from a stream of its own and moves
    nothing; metrics.jsonl has its keys."""
    a, b, c = (
        train(script, world, seed=seed, run_name=name) for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    )
    equal_runs(a, b)
    assert lines(a)[1:] != lines(c)[1:]
    d = train(script, world, run_name="d", eval_every=1, eval_samples=3)
    strip = lambda rows: [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]
    assert strip(lines(a)) == strip(lines(d)) and all("eval/pass@3" in row for row in lines(d))
    calls = [r for *_, r in seen(held_out=True)][
        -4:
    ]  # the last evaluation: greedy and three samples, five rows and one
    passed = [[r >= 1 for part in calls[first::2] for r in part] for first in (0, 1)]
    groups = [passed[1][i : i + 3] for i in range(0, 18, 3)]
    found = [d[f"eval/{name}"] for name in ("greedy", "pass@1", "pass@3")]
    assert found == pytest.approx([sum(passed[0]) / 6, sum(passed[1]) / 18, sum(map(any, groups)) / 6])
    assert 0 < found[1] < found[2]
    weights = checkpoint(a)["parts"]["model"]
    assert all(torch.equal(p, weights[name]) for name, p in checkpoint(d)["parts"]["model"].items())
    rows = joined("runs/a/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert not script.own or all(set(row) - {"eval/greedy"} == {"step", *KEYS.split()} for row in rows[1:])
    assert (
        rows[1]["charts/tokens"] > 16 and rows[1]["charts/response_length"] == rows[1]["charts/tokens"] / 16
    )


KINDS = [
    ("signal", {}),
    ("raise", dict(model="gpt2", sampling_rounds=2, anneal_lr=True, warmup_steps=3)),
    ("signal", dict(kl_coef=0.1, kl_form="reward")),
    ("raise", dict(kl_coef=0.1, lora_rank=2)),
    ("signal", dict(dtype="bfloat16", eval_every=1, eval_samples=2)),
]


@pytest.mark.parametrize("how, flags", KINDS, ids=str)
def test_stopped_and_resumed_equals_uninterrupted(script, world, how, flags):
    """After SIGTERM (exit code 143, a checkpoint of that step) or a crash (the last checkpoint) a resumed run is the
    uninterrupted one to the bit, its later lines dropped."""
    if "lora_rank" in flags:
        pytest.importorskip("peft")
    flags = dict(total_steps=5, save_every=2 if how == "raise" else 100, run_name="x", **flags)
    whole = train(script, world, **flags)
    os.rename("runs/x", "runs/whole")
    whole["folder"] = "runs/whole"
    calls = [(p[0][0] == "9") for p, *_ in map(json.loads, open("seen.jsonl"))]
    steps = [i for i, held_out in enumerate(calls) if not held_out]
    Path("stop").write_text(f"{how} {steps[2 if how == 'signal' else -1] + 1}")
    with pytest.raises(SystemExit) as stop:
        train(script, world, **flags)
    assert stop.value.code == (128 + signal.SIGTERM if how == "signal" else 7) and not os.path.exists("stop")
    step = torch.load("runs/x/checkpoint.pt", weights_only=True)["step"]
    assert step == 4 if how == "raise" else 0 < step < 4
    with open("runs/x/metrics.jsonl", "a") as file:
        file.write('{"step": 99}\n')  # a line written after the checkpoint must go
    resumed = resume(script, "runs/x")
    equal_runs(whole, resumed)


def test_torn_line_does_not_stop_a_resume(script, world):
    """The last line of metrics.jsonl may be torn when a run is killed: it goes, as all lines after the checkpoint do."""
    Path("stop").write_text("raise 4")
    with pytest.raises(SystemExit):
        train(script, world, save_every=1, run_name="x")
    with open("runs/x/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "losses/po')
    resumed = resume(script, "runs/x")
    assert [row["step"] for row in lines(resumed)] == [0, 1, 2, 3]


def test_nan_stops_the_run_and_keeps_the_good_checkpoint(script, world, monkeypatch):
    """A gradient or weights of NaN end the run with the step and the last good checkpoint, which is whole (B85)."""
    aggregate, rollout, calls = script.watch("aggregate"), script.watch("sample_groups"), []
    poisoned = lambda *a, **k: aggregate(*a, **k) * (1.0 if len(calls) < 3 else math.nan)
    monkeypatch.setattr(script.module, "aggregate", poisoned)
    monkeypatch.setattr(script.module, "sample_groups", lambda *a, **k: calls.append(1) or rollout(*a, **k))
    with pytest.raises(
        FloatingPointError, match="stopped at step 3: the gradient .*runs/x/checkpoint.pt, step 2"
    ):
        train(script, world, save_every=1, run_name="x")
    state = checkpoint({"folder": "runs/x"})
    assert state["step"] == 2 and all(p.isfinite().all() for p in state["parts"]["model"].values())
    with pytest.raises(FloatingPointError, match="stopped at step 1: the gradient .* none yet"):
        train(script, world, run_name="y")

    def poison(sampler, *rest, **named):
        next(sampler.model.parameters()).data.fill_(math.nan)
        return rollout(sampler, *rest, **named)

    monkeypatch.setattr(script.module, "sample_groups", poison)
    with pytest.raises(FloatingPointError, match="stopped at step 1: .*logits .* none yet"):
        train(script, world, run_name="z")


def test_the_bfloat16_sampler_has_the_weights_of_the_model(script, world, record):
    """With --dtype bfloat16 each step samples from a rounded copy of the current weights (B112, B116)."""
    events = record("sample_groups", "prepare", "surrogate")
    out = train(script, world, dtype="bfloat16")
    for (sampler, *_), (model, *_) in zip(
        inputs_of(events, "sample_groups"), inputs_of(events, "prepare"), strict=True
    ):
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(sampler.parameters(), model.parameters()))
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert 0 < out["losses/mismatch"] < 0.1


def test_half_written_checkpoint_never_replaces_a_good_one(script, world, monkeypatch):
    """A write that dies halfway leaves the old checkpoint as it was."""
    path = Path(train(script, world, run_name="x")["folder"]) / "checkpoint.pt"
    good = path.read_bytes()

    def dies(state, file):
        (file.write if hasattr(file, "write") else Path(file).write_bytes)(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(script.UsageError, match="cannot write runs/x/checkpoint.pt: OSError: disk full"):
        resume(script, "runs/x", total_steps=4)
    assert path.read_bytes() == good and not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize("own_file", [True, False])
def test_held_out_prompts_are_never_trained_on(script, world, own_file):
    """The rows of --eval-dataset, or the last ones of --dataset, reach no training step, duplicates included; every
    other prompt is drawn once before any is drawn twice."""
    rows = (world / "data.jsonl").read_text().splitlines(keepends=True)
    held_out = {json.loads(row)["prompt"] for row in rows[-6:]}
    Path("data.jsonl").write_text("".join(rows[-6:] * 2 + rows if not own_file else rows))
    Path("held.jsonl").write_text("".join(rows[-6:]))
    train(script, world, dataset="data.jsonl", eval_dataset="held.jsonl" if own_file else None, total_steps=7)
    trained = [prompt for prompts, *_ in seen() for prompt in prompts[::4]]
    assert {p for prompts, *_ in seen(held_out=True) for p in prompts} == held_out
    assert len(seen()) == 7 and len(set(trained)) == min(28, len(rows) - 6) and len(seen(held_out=True)) == 2


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_saved_model_is_the_trained_one(script, world, lora_rank):
    """runs/<name>/model loads with transformers alone and gives the greedy completions of the last evaluation."""
    if lora_rank:
        pytest.importorskip("peft")
    folder = train(script, world, learning_rate=3e-2, lora_rank=lora_rank)["folder"]
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/model")
    records = [json.loads(line) for line in open(f"{folder}/completions.jsonl")]
    assert [r["step"] for r in records] == [0] * 6 + [3] * 6
    for record in records[6:]:
        prompt, response = tokenizer(record["prompt"]).input_ids, []
        while len(response) < 6 and response[-1:] not in ([1], [9]):
            response.append(brute(model, prompt, [*response, 0], 1.0)[-1].argmax().item())
        shown = [t for t in response if t not in STOPS]
        assert record["completion"] == tokenizer.decode(shown, skip_special_tokens=True)
        assert record["ended"] == (response[-1] in STOPS)
    assert [r["completion"] for r in records[:6]] != [r["completion"] for r in records[6:]]


def test_dropout_is_off_and_checkpointing_changes_nothing(script, world, monkeypatch):
    """Dropout in the checkpoint's config is switched off in every pass (B86, verl-project/verl #4708); recomputed
    activations give the same weights."""
    block = transformers.models.gpt2.modeling_gpt2.GPT2MLP
    forward, calls = block.forward, []
    monkeypatch.setattr(block, "forward", lambda *a: calls.append(1) or forward(*a))
    weights, counts = [], []
    for name, flags in (("gpt2", {}), ("dropout", {}), ("dropout", dict(gradient_checkpointing=True))):
        calls.clear()
        out = train(script, world, model=name, max_grad_norm=1e-2, run_name=f"{len(weights)}", **flags)
        weights.append(checkpoint(out)["parts"]["model"])
        counts.append(len(calls))
    assert all(torch.equal(p, weights[0][name]) for name, p in weights[1].items())
    error = torch.cat([(p - weights[0][name]).abs().flatten() for name, p in weights[2].items()])
    assert (error < 1e-5).float().mean() > 0.99 and counts[2] > counts[0] == counts[1]


PAPERS = {  # advantage, surrogate, clip_low, clip_high, aggregation, kl_coef, kl_form
    "grpo": ("grpo", "clip", 0.2, 0.2, "sequence", 0.04, "k3"),
    "rloo": ("rloo", "reinforce", 0.2, 0.28, "constant", 0.05, "reward"),
    "drgrpo": ("drgrpo", "clip", 0.2, 0.2, "constant", 0.0, "k3_unbiased"),
    "dapo": ("grpo", "clip", 0.2, 0.28, "token", 0.0, "k3_unbiased"),
    "gspo": ("grpo", "gspo", 3e-4, 4e-4, "sequence", 0.0, "k3_unbiased"),
    "cispo": ("grpo", "cispo", 0.2, 0.28, "token", 0.0, "k3_unbiased"),
}


@pytest.mark.flags("preset")
@pytest.mark.parametrize("preset", PAPERS)
def test_presets_are_the_papers(script, preset):
    """--preset sets what its paper had, a flag given beside it wins, and all else stays."""
    names = ("advantage", "surrogate", "clip_low", "clip_high", "aggregation", "kl_coef", "kl_form")
    args = script.command_line(["--preset", preset])
    assert tuple(getattr(args, name) for name in names) == PAPERS[preset]
    dapo = (4, 0.2) if preset == "dapo" else (1, 0.0)
    assert (args.sampling_rounds, args.overlong_buffer) == dapo
    assert args.num_updates == (1 if preset == "rloo" else 4)
    args = script.command_line(
        ["--preset", preset, "--clip-high", "0.33", "--aggregation", "token", "--seed", "7"]
    )
    assert (args.clip_high, args.aggregation, args.seed, args.clip_low) == (
        0.33,
        "token",
        7,
        PAPERS[preset][2],
    )
    assert args.learning_rate == script.BUILT_IN["learning_rate"]


# ---- learning ----


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "cispo", "reinforce"])
def test_learns_a_task_whose_optimum_is_known(script, world, surrogate):
    """One token, rewarded if it is a 5: from chance (below 0.3) to nearly always, with every surrogate."""
    flags = dict(update_epochs=1, num_minibatches=1) if surrogate == "reinforce" else {}
    flags |= dict(total_steps=25, max_new_tokens=1, group_size=8, learning_rate=1e-2, temperature=1.0)
    train(script, world, reward="five", surrogate=surrogate, **flags)
    rewards = [sum(rewards) / len(rewards) for *_, rewards in seen()]
    assert sum(rewards[:2]) / 2 < 0.3 and sum(rewards[-5:]) / 5 > 0.9


def test_the_built_in_task_is_learnt(script, monkeypatch):
    """The default run, cut short: a model half taught to sort gets clearly better within 8 steps."""
    start = script.supervised_start
    monkeypatch.setattr(script.module, "supervised_start", lambda *a: start(*a, steps=110))
    flags = script.BUILT_IN | dict(
        total_steps=8, learning_rate=4e-4, num_eval=100, eval_every=0, eval_samples=0
    )
    out = script.main(script.Args(**flags, device="cpu"))
    before, after = lines(out)[0]["eval/greedy"], lines(out)[-1]["eval/greedy"]
    assert 0.05 < before < 0.5 and after > before + 0.2


# ---- self-checks ----


def test_self_check_names_what_is_broken(script, world, monkeypatch):
    """A wrong temperature (B59, B115), wrong positions (B62) or another reference (B88) end the run before its first
    update with a sentence; without the checks it runs on."""
    logps, load_model, reference_of = script.token_logps, script.load_model, script.reference_of

    def shifted(name):
        tokenizer, model = load_model(name)
        forward = model.forward
        late = lambda use_cache, position_ids, **_: {"position_ids": position_ids + (not use_cache)}
        model.forward = lambda *inputs, **named: forward(*inputs, **{**named, **late(**named)})
        return tokenizer, model

    def other(*inputs):
        frozen = reference_of(*inputs)
        next(frozen.parameters()).data.mul_(1.5)
        return frozen

    for name, broken, message in (
        ("token_logps", lambda logits, tokens, _: logps(logits, tokens, 1.0), "sampled and as scored"),
        ("load_model", shifted, "sampled and as scored"),
        ("reference_of", other, "the reference differs"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(script.module, name, broken)
            with pytest.raises(script.UsageError, match=f"stopped at step 1: self-check: .*{message}"):
                train(script, world, model="gpt2", kl_coef=0.1, run_name=name)
            train(script, world, model="gpt2", kl_coef=0.1, self_checks=False, total_steps=1)
