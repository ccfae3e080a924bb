"""The loop of ppo_rlhf.py: what it samples, scores, passes on and writes, on models small enough to check all."""

import copy
import itertools
import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing import assert_close

pytestmark = pytest.mark.setting("ppo_rlhf")
SMALL = dict(
    num_prompts=16, max_new_tokens=6, num_minibatches=2, update_epochs=2, total_steps=3, num_eval=6, eval_every=0,
    learning_rate=2e-3, value_learning_rate=3e-3, warmup_steps=0, anneal_lr=False, temperature=0.7, batch_tokens=60,
    normalize_scores=20, gamma=0.97, gae_lambda=0.9, vf_coef=0.5, kl_coef=0.3, missing_eos_penalty=0.6, device="cpu",
)  # fmt: skip
STOPS, MODELS, NAMES = [1, 9], ["gpt2", "llama"], ["<pad>", "<eos>", "=", *"0123456789"]
TRAPS = dict(top_k=2, top_p=0.8, temperature=0.3, do_sample=True, repetition_penalty=1.5, min_new_tokens=5)
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
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
    assert all(p == row["prompt"] and p[0] == row["first"] for p, row in zip(prompts, rows))
    return write(prompts, texts, quarters(texts))
def five(prompts, texts, rows):
    return write(prompts, texts, [float(text[:1] == "5") for text in texts])
def rare(prompts, texts, rows):
    """Nothing for the first 20 responses: those of the normalisation."""
    return write(prompts, texts, [float(len(texts) != 20) * r for r in quarters(texts)])
def holes(prompts, texts, rows):
    return write(prompts, texts, [None if r == 0.25 else r for r in quarters(texts)])
def first_hole(prompts, texts, rows):
    return write(prompts, texts, [None if i == 3 and len(texts) == 20 else r for i, r in enumerate(quarters(texts))])
'''


def word_level(tokens, template=None):
    """A tokenizer with one token for each character of `tokens`, beside padding and stop."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<pad>", "<eos>", *tokens])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    out = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    out.chat_template = template
    return out


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Folders of two random policies (absolute and rotary positions) whose generation configs are full of traps and of
    two classifiers (the policy's vocabulary; another one with a chat template), prompts of different lengths, pairs."""
    root = tmp_path_factory.mktemp("world")
    common = dict(vocab_size=13, bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False)
    gpt2 = dict(n_embd=24, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    llama = dict(hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    llama |= dict(max_position_embeddings=64, initializer_range=0.25)
    dropout = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    digits, chat = word_level("=0123456789"), word_level("<>;ua9876543210=", TEMPLATE)
    causal = transformers.AutoModelForCausalLM.from_config
    classify = transformers.AutoModelForSequenceClassification.from_config
    for name, config, build, tokenizer, seed in (
        ("gpt2", transformers.GPT2Config(**common, **gpt2), causal, digits, 0),
        ("dropout", transformers.GPT2Config(**common, **gpt2, **dropout), causal, digits, 0),
        ("llama", transformers.LlamaConfig(**common, **llama), causal, digits, 4),
        ("judge", transformers.LlamaConfig(**common, **llama, num_labels=1), classify, digits, 5),
        (
            "chat",
            transformers.LlamaConfig(**common | {"vocab_size": 18}, **llama, num_labels=1),
            classify,
            chat,
            6,
        ),
    ):
        torch.manual_seed(seed)
        build(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        if build is causal:
            traps = {**TRAPS, "eos_token_id": STOPS}
            (root / name / "generation_config.json").write_text(json.dumps(traps))
    prompts = [f"{first}{'1234567'[: i % 6]}{i:02d}="[i % 3 :] for i, first in enumerate("1234567" * 4)]
    prompts = [p if p[0] not in "09" else "8" + p for p in prompts] + [f"9{i}=" for i in range(6)]
    rows = [json.dumps({"prompt": p, "first": p[0]}) + "\n" for p in dict.fromkeys(prompts)]
    (root / "data.jsonl").write_text("".join(rows))
    (root / "rewards.py").write_text(REWARDS)
    g = generator(7)
    digit = lambda n: "".join(str(int(x)) for x in torch.randint(0, 7, (n,), generator=g))
    pairs = [
        {
            "prompt": f"{i % 7}{'123'[: i % 3]}{i:03o}=",
            "chosen": f"{digit(i % 3)}8{digit(1)}",
            "rejected": digit(2 + i % 3),
        }
        for i in range(150)
    ]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return root


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def arguments(script, world, policy="llama", reward="digits", **flags):
    """Small settings; fails (ours) or skips (a copy) if a flag is gone."""
    flags = {"policy": str(world / policy), "prompts": str(world / "data.jsonl"), **SMALL, **flags}
    if "reward_model" in flags:
        flags["reward_model"] = str(world / flags["reward_model"])
    elif "train_reward_model" not in flags:
        flags["reward"] = f"{world / 'rewards.py'}:{reward}"
    return script.Args(**script.flags(**flags))


def train(script, world, **flags):
    return script.main(arguments(script, world, **flags))


def load(script, world, name):
    tokenizer, model = (script.load_classifier if name in ("judge", "chat") else script.load_model)(
        str(world / name)
    )
    return tokenizer, model.eval()


def seen(held_out=False):
    """What the reward function saw and gave, call by call: prompts, completions, rewards."""
    calls = [json.loads(line) for line in open("seen.jsonl")]
    return [call for call in calls if (call[0][0][0] == "9") == held_out]


CLOCK = ("charts/TPS", "charts/SPS", "time/rollout", "time/update", "time/cpu")


def lines(out, kind="metrics"):
    """metrics.jsonl, the lines of one step joined, without the numbers that depend on the clock; completions.jsonl."""
    rows = [json.loads(line) for line in open(Path(out["folder"]) / f"{kind}.jsonl")]
    if kind == "completions":
        return rows
    steps = {}
    for row in rows:
        steps[row["step"]] = steps.get(row["step"], {}) | row
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in steps.values()]


def checkpoint(out):
    return torch.load(Path(out["folder"]) / "checkpoint.pt", weights_only=True)


def parts(out):
    """What a checkpoint keeps, by name."""
    return checkpoint(out)["parts"]


def snapshot(x):
    if hasattr(x, "policy") and hasattr(x, "critic"):  # the learner
        return SimpleNamespace(**{name: snapshot(value) for name, value in vars(x).items()})
    if hasattr(x, "respond"):  # the sampler
        return SimpleNamespace(source=snapshot(x.source))
    if isinstance(x, dict):
        return {key: snapshot(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(snapshot, x))
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x)
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture
def record(script, monkeypatch):
    """record(*names) notes (name, inputs, result) of every call, and ("step", ...) of the optimiser, in order; inputs of
    `inputs_first` functions are noted before the call too, as ("begin", ...)."""
    events = []
    rates = lambda optimizer: [group["lr"] for group in optimizer.param_groups]
    note = lambda optimizer, *_: events.append(("step", rates(optimizer), type(optimizer).__name__))
    hook = register_optimizer_step_pre_hook(note)

    def start(*names):
        for name in names:
            owner = script.find("Sampler") if name == "respond" else script.module
            function = getattr(owner, name) if name == "respond" else script.watch(name)

            def recorder(*inputs, function=function, name=name, **named):
                before = snapshot(tuple(script.as_ours(function, inputs, named)))
                if name in ("sample_batch", "update_models"):
                    events.append(("begin " + name, before, None))
                result = function(*inputs, **named)
                events.append((name, before, snapshot(result)))
                return result

            monkeypatch.setattr(owner, name, recorder)
        return events

    yield start
    hook.remove()


def inputs_of(events, name):
    return [inputs for kind, inputs, _ in events if kind == name]


def results_of(events, name):
    return [result for kind, _, result in events if kind == name]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ids_of(text):
    return [NAMES.index(character) for character in text]


def responses_of(batch):
    """The responses of a batch by the stop ids alone, and whether each ended."""
    out = []
    for row in batch["tokens"].tolist():
        ends = [i for i, token in enumerate(row) if token in STOPS]
        out.append((row[: ends[0] + 1], True) if ends else (row, False))
    return out


def text_of(response):
    return "".join(NAMES[token] for token in response if token not in (0, *STOPS))


def plain_logps(model, prompt, response, temperature=0.7):
    """Log-probabilities of a response, alone and unpadded, with gradient."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def plain_values(critic, prompt, response):
    """The value before each token of a response: the head at the token before it, alone and unpadded."""
    hidden = critic.base_model(torch.tensor([prompt + response])).last_hidden_state
    return critic.score(hidden)[0, len(prompt) - 1 : -1, 0]


def plain_score(classifier, tokenizer, prompt, completion):
    """What a reward model says of a text by a forward of its own."""
    text = f"<u>{prompt};<a>{completion};" if tokenizer.chat_template else prompt + completion
    vocabulary = tokenizer.get_vocab()
    ids = torch.tensor([[vocabulary[character] for character in text]])
    with torch.no_grad():
        return classifier.score(classifier.base_model(ids).last_hidden_state)[0, -1, 0].item()


def definition_of_gae(rewards, values, gamma, lam):
    """A_t = sum over k of (gamma lambda)^k delta_(t+k), one response, which ends after its last token."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return torch.tensor([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])


def textbook_batch(policy, start, critic, rows, responses, raw, norm, coef, args):
    """Per response: log-probabilities, reference, values, rewards, advantages (whitened), returns; plain loops."""
    out = []
    for row, (response, ended), score in zip(rows, responses, raw):
        with torch.no_grad():
            logp = plain_logps(policy, row["ids"], response, args.temperature)
            ref = plain_logps(start, row["ids"], response, args.temperature)
            values = plain_values(critic, row["ids"], response)
        rewards = -coef * (logp - ref)
        rewards[-1] += (score - norm["mean"]) / norm["std"] - (0.0 if ended else args.missing_eos_penalty)
        adv = definition_of_gae(rewards.tolist(), values.tolist(), args.gamma, args.gae_lambda)
        names = ("logps", "ref_logps", "values", "rewards", "advantages", "returns")
        out.append(dict(zip(names, (logp, ref, values, rewards, adv, adv + values))))
    every = torch.cat([one["advantages"] for one in out])
    for one in out:
        one["advantages"] = (one["advantages"] - every.mean()) / (every.var(correction=0) + 1e-8).sqrt()
    return out


def check(found, expected, name):
    """Row by row equal, and 0 behind the end."""
    for row, one in zip(found, expected, strict=True):
        n = len(one[name])
        assert_close(row[:n], one[name], atol=2e-4, rtol=2e-4)
        assert (row[n:] == 0).all()


# ---- what the loop passes on ----

WAYS = [
    ("llama", {}),
    ("gpt2", dict(batch_tokens=2000)),
    ("llama", dict(reward_model="judge", kl_target=0.35, kl_horizon=40)),
    ("gpt2", dict(reward_model="chat", normalize_scores=0)),
    ("llama", dict(lora_rank=2, kl_coef=0.1, learning_rate=2e-2)),
]


@pytest.mark.parametrize("policy_name, flags", WAYS, ids=str)
def test_every_response_has_its_own_numbers(script, world, record, policy_name, flags):
    """The normalised score stands at the last token of each response (B67, huggingface/trl #3750), less the penalty of
    those that did not end; the KL penalty at every token is that to the frozen starting policy (B74, B88); values are
    those before each token (B65, huggingface/trl #44), 0 after the end; advantages and returns are those of a double sum
    over one unpadded response (B76), whitened over all tokens of the batch and 0 elsewhere (B79, verl-project/verl #1527)."""
    if "lora_rank" in flags:
        pytest.importorskip("peft")
    events = record("respond", "sample_batch", "shape_rewards", "compute_gae")
    out = train(script, world, policy=policy_name, **flags)
    args, start = arguments(script, world, policy=policy_name, **flags), load(script, world, policy_name)[1]
    judge = load(script, world, flags["reward_model"]) if "reward_model" in flags else None

    def raw_of(rows, responses):
        texts = [(row["prompt"], text_of(response)) for row, (response, _) in zip(rows, responses)]
        if judge:
            return [plain_score(judge[1], judge[0], *text) for text in texts]
        return [sum(int(c) for c in text if c.isdigit()) % 5 / 4 for _, text in texts]

    norm = {"mean": 0.0, "std": 1.0}
    if args.normalize_scores:  # the first responses, of the starting policy
        (_, rows, *_), (batch, _) = next(
            (inputs, result) for kind, inputs, result in events if kind == "respond"
        )
        raw = torch.tensor(raw_of(rows, responses_of(batch)))
        assert len(raw) == args.normalize_scores and len({row["prompt"] for row in rows}) == 20
        assert all(row["prompt"][0] != "9" for row in rows)
        norm = {"mean": raw.mean().item(), "std": raw.std().item()}
        assert parts(out)["norm"] == pytest.approx(norm, rel=1e-4)
    coef, kinds, prompts = args.kl_coef, set(), []
    calls = zip(
        [(i, r) for kind, i, r in events if kind == "sample_batch"],
        [(i, r) for kind, i, r in events if kind == "shape_rewards"],
        inputs_of(events, "compute_gae"), lines(out)[1:], strict=True,
    )  # fmt: skip
    for number, ((inputs, (batch, _)), (shaping, shaped), gae, row) in enumerate(calls):
        learner, _, rows, _ = inputs
        policy, critic, responses = learner.policy, learner.critic, responses_of(batch)
        raw = raw_of(rows, responses)
        assert batch["rewards"].tolist() == pytest.approx(raw, abs=1e-4)
        assert batch["prompts"] == [ids_of(r["prompt"]) for r in rows]
        right = textbook_batch(policy, start, critic, rows, responses, raw, norm, coef, args)
        for name in ("logps", "ref_logps", "values", "advantages", "returns"):
            check(batch[name], right, name)
        check(shaped, right, "rewards")
        rewards, values, after, terminated, done, gamma, lam = gae
        assert (gamma, lam) == (0.97, 0.9) and done.shape == rewards.shape == (len(shaped[0]), 16)
        for i, (response, ended) in enumerate(responses):
            n = len(response)
            assert_close(rewards[:n, i], right[i]["rewards"], atol=2e-4, rtol=2e-4)
            assert_close(after[: n - 1, i], right[i]["values"][1:], atol=2e-4, rtol=2e-4)
            assert done[:n, i].tolist() == terminated[:n, i].tolist() == [False] * (n - 1) + [True]
            kinds.add((n, ended))
        if number < 1:  # the unpadded forwards against one for each prefix
            for row_, (response, _), one in list(zip(rows, responses, right))[:3]:
                for t in range(len(response)):
                    prefix = torch.tensor([row_["ids"] + response[:t]])
                    value = critic.score(critic.base_model(prefix).last_hidden_state)[0, -1, 0]
                    logp = (policy(prefix).logits[0, -1] / 0.7).log_softmax(-1)[response[t]]
                    assert_close(torch.stack([value, logp]), torch.stack([one["values"][t], one["logps"][t]]))
        k1 = torch.stack([(one["logps"] - one["ref_logps"]).sum() for one in right])
        assert (k1.abs().max() < 1e-4) if number == 0 else (k1.abs().max() > 0.05)
        assert row["charts/kl_coef"] == pytest.approx(coef, rel=1e-4) == shaping[4]
        assert row["losses/kl"] == pytest.approx(k1.mean().item(), abs=1e-4)
        tokens = sum(len(one["logps"]) for one in right)
        total = [sum(one["rewards"].tolist()) for one in right]
        assert row["charts/score"] == pytest.approx(sum(raw) / 16, abs=1e-4)
        assert row["charts/objective"] == pytest.approx(sum(total) / 16, abs=1e-3)
        assert row["losses/kl_per_token"] == pytest.approx(k1.sum().item() / tokens, abs=1e-4)
        assert row["charts/tokens"] == tokens and row["charts/response_length"] == tokens / 16
        assert row["charts/eos_share"] == sum(ended for _, ended in responses) / 16
        if args.kl_target:
            coef *= 1 + min(max(k1.mean().item() / args.kl_target - 1, -0.2), 0.2) * 16 / args.kl_horizon
        prompts += [r["prompt"] for r in rows]
        values = torch.cat([one["values"] for one in right])
        assert (values == 0).all() if number == 0 and "judge" not in str(flags) else (values != 0).all()
    assert kinds >= {(1, True), (3, True), (6, True), (6, False)}, kinds
    assert len(set(prompts[:28])) == 28 and not {p for p in prompts if p[0] == "9"}
    assert args.kl_target is None or coef != args.kl_coef
    names = set(parts(out)["model"])
    if args.lora_rank:
        assert all("lora_" in name or name.startswith("critic.") for name in names) and len(names) > 20
    else:
        assert {n[7:] for n in names if n[:7] == "policy."} == {n for n, _ in start.named_parameters()}


def minibatches_of(events):
    """Of each training step: the batch, and of each minibatch its calls; the last may lack its optimiser step."""
    for kind, inputs, _ in events:
        if kind == "begin update_models":
            batch, steps = inputs[2], [[]]
        elif kind in ("policy_loss", "value_loss"):
            steps[-1].append((kind, inputs))
        elif kind == "step":
            steps.append([])
        elif kind == "update_models":
            yield batch, steps


def test_minibatches_pair_each_response_with_its_numbers(script, world, record):
    """Each response is in one minibatch of an epoch, with its own old log-probability, advantage, return and value (B82,
    verl-project/verl #1440; B83); the ratio is 1 in the first minibatch of a batch and not later."""
    events = record("update_models", "policy_loss", "value_loss")
    train(script, world, reward_model="judge", learning_rate=1e-2, clip_coef=0.15, value_clip=0.25)
    for batch, steps in minibatches_of(events):
        epochs = []
        assert len(steps) == 5 and not steps[-1]
        for number, step in enumerate(steps[:-1]):
            mine = []
            for (kind, a), (other, b) in zip(step[::2], step[1::2], strict=True):
                assert (
                    (kind, other) == ("policy_loss", "value_loss") and a[3:] == (0.15, 0.15) and b[3] == 0.25
                )
                for logp, old, adv, value, old_value, ret in zip(*a[:3], *b[:3]):
                    given = dict(logps=old, advantages=adv, returns=ret, values=old_value)
                    fits = [
                        i for i in range(16) if all(torch.equal(batch[n][i], x) for n, x in given.items())
                    ]
                    taken = [*epochs[16 * (number // 2) :], *mine]  # equal responses have equal numbers
                    i = next((i for i in fits if i not in taken), None)
                    assert i is not None, "no response has all of these numbers"
                    keep = batch["mask"][i]
                    if number == 0:
                        assert_close(logp[keep], old[keep], atol=1e-5, rtol=1e-5)
                        assert_close(value[keep], old_value[keep], atol=1e-5, rtol=1e-4)
                    else:
                        assert (logp - old)[keep].abs().max() > 1e-4
                        assert (value - old_value)[keep].abs().max() > 1e-4
                    mine.append(i)
            assert len(mine) == 8
            epochs += mine
        assert sorted(epochs[:16]) == sorted(epochs[16:]) == list(range(16))
        assert set(epochs[:8]) not in (set(epochs[16:24]), set(epochs[24:]))  # a fresh shuffle


# ---- the update ----


def textbook_losses(policy, critic, rows, responses, right, samples, args):
    """Policy and value loss of one optimiser step, written out: a loop over unpadded responses."""
    tokens = sum(len(responses[i][0]) for i in samples)
    policy_part, value_part, kl, clipped = 0.0, 0.0, 0.0, 0
    for i in samples:
        one, response = right[i], responses[i][0]
        logp, values = (
            f(m, rows[i]["ids"], response) for f, m in ((plain_logps, policy), (plain_values, critic))
        )
        ratio, adv = (logp - one["logps"]).exp(), one["advantages"]
        bounded = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        weight = 1.0
        if "sampled" in one:  # a sampler that is not quite the policy
            weight = (one["logps"] - one["sampled"]).exp().clamp(max=args.importance_cap)
        policy_part = policy_part - (weight * torch.minimum(ratio * adv, bounded * adv)).sum() / tokens
        near = one["values"] + (values - one["values"]).clamp(-args.value_clip, args.value_clip)
        errors = torch.maximum((values - one["returns"]) ** 2, (near - one["returns"]) ** 2)
        value_part = value_part + 0.5 * errors.sum() / tokens
        kl += (ratio - 1 - ratio.log()).sum().item() / tokens
        clipped += (ratio * adv > bounded * adv + 1e-9).sum().item() / tokens
    return policy_part, value_part, kl, clipped


@pytest.mark.parametrize("norm", [0.05, 1e6])
def test_update_equals_the_textbook(script, world, record, norm):
    """Two training steps of two epochs and two minibatches (order, learning rates with warm-up and decay, two norms
    clipped apart, AdamW) move policy and value model as an independent implementation does (B25, B31, B107), with the
    weights of terms that are new in a copy (flags named ..._coef) at 0."""
    events = record("sample_batch")
    flags = dict(total_steps=2, warmup_steps=2, anneal_lr=True, max_grad_norm=norm, reward_model="judge")
    flags |= dict(value_clip=0.1, clip_coef=0.1, learning_rate=4e-3, kl_target=1.0, kl_horizon=40)
    flags |= script.new_terms_off()
    out = train(script, world, **flags)
    kinds = set(results_of(events, "step"))
    if kinds and kinds != {"AdamW"}:
        script.gone(f"has another optimiser, {', '.join(sorted(kinds))}")
    args, start = arguments(script, world, **flags), load(script, world, "llama")[1]
    tokenizer, judge = load(script, world, "judge")
    policy, critic = copy.deepcopy(start), copy.deepcopy(judge)
    groups = [{"params": policy.parameters()}, {"params": critic.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0)
    shuffle = torch.Generator().manual_seed(int(script.streams(1)[2].generate_state(1)[0]))
    rates = inputs_of(events, "step")
    assert len(rates) == 8 and all(rate == pytest.approx([2e-3, 1.5e-3]) for rate in rates)
    coef, norm_, found = 0.3, parts(out)["norm"], []
    for inputs, (batch, _) in [(i, r) for kind, i, r in events if kind == "sample_batch"]:
        rows, responses = inputs[2], responses_of(batch)
        raw = [
            plain_score(judge, tokenizer, row["prompt"], text_of(response))
            for row, (response, _) in zip(rows, responses)
        ]
        right = textbook_batch(policy, start, critic, rows, responses, raw, norm_, coef, args)
        found = []
        for group, rate in zip(optimizer.param_groups, (2e-3, 1.5e-3)):
            group["lr"] = rate
        for _ in range(2):
            for samples in torch.randperm(16, generator=shuffle).tensor_split(2):
                optimizer.zero_grad()
                losses = textbook_losses(policy, critic, rows, responses, right, samples.tolist(), args)
                losses[0].backward()
                (0.5 * losses[1]).backward()
                norms = [
                    torch.nn.utils.clip_grad_norm_(m.parameters(), norm).item() for m in (policy, critic)
                ]
                optimizer.step()
                found.append([losses[0].item(), losses[1].item(), *losses[2:], *norms])
        k1 = sum((one["logps"] - one["ref_logps"]).sum().item() for one in right) / 16
        coef *= 1 + min(max(k1 / 1.0 - 1, -0.2), 0.2) * 16 / 40
    trained = parts(out)["model"]
    for name, model in (("policy", policy), ("critic", critic)):
        error = torch.cat([(trained[f"{name}.{n}"] - p).abs().flatten() for n, p in model.named_parameters()])
        assert (error < 2e-5).float().mean() > 0.99 and error.mean() < 5e-6, error.sort().values[-20:]
    names = "policy_loss value_loss approx_kl clipfrac grad_norm value_grad_norm".split()
    for name, value in zip(names, torch.tensor(found).mean(0).tolist()):
        assert out[f"losses/{name}"] == pytest.approx(value, rel=5e-3, abs=1e-4), name
    assert min(min(f[4:]) for f in found) > 0.05 and out["losses/clipfrac"] > 0.02
    assert out["charts/updates"] == 4 and parts(out)["kl_coef"] == pytest.approx(coef, rel=1e-4)


class Gradients:
    """An optimiser that keeps the gradient of each step and moves nothing."""

    def __init__(self, *models):
        self.models, self.steps = models, []

    def zero_grad(self):
        for model in self.models:
            model.zero_grad()

    def step(self):
        self.steps.append([torch.cat([p.grad.flatten() for p in m.parameters()]) for m in self.models])


@pytest.mark.parametrize("value_clip", [0.2, None])
def test_gradient_of_a_step_does_not_depend_on_the_cut(script, world, record, value_clip):
    """The gradients of an optimiser step are those of its losses written out, however it is cut into micro-batches, with
    recomputed activations too (B107); what stands behind the end of a response reaches nothing (B85). Each token's loss
    is weighed by the trainer's over the sampler's probability, --importance-cap at most (B116, huggingface/trl #3867).
    """
    events = record("sample_batch")
    train(script, world, reward_model="judge", total_steps=1)
    (inputs, (batch, _)), *_ = [(i, r) for kind, i, r in events if kind == "sample_batch"]
    args = arguments(
        script, world, reward_model="judge", max_grad_norm=1e9, update_epochs=1, **script.new_terms_off()
    )
    args.value_clip = value_clip
    learner, _, rows, _ = inputs
    policy, critic, responses = learner.policy, learner.critic, responses_of(batch)
    noise = lambda size: torch.randn(batch["logps"].shape, generator=generator(8)) * size * batch["mask"]
    batch["logps"], batch["values"] = batch["logps"] + noise(0.3), batch["values"] + noise(0.3)
    names = ("logps", "values", "advantages", "returns")
    if script.has_flag("importance_cap"):
        names, batch["sampled"] = (*names, "sampled"), batch["logps"] + noise(1.0).flip(0) * batch["mask"]
        assert (batch["logps"] - batch["sampled"]).max() > math.log(args.importance_cap)
    right = [{n: batch[n][i, : len(r)] for n in names} for i, (r, _) in enumerate(responses)]
    expected = Gradients(policy, critic)
    for samples in torch.randperm(16, generator=generator()).tensor_split(2):
        expected.zero_grad()
        settings = copy.copy(args)
        settings.value_clip = value_clip or 1e9
        losses = textbook_losses(policy, critic, rows, responses, right, samples.tolist(), settings)
        (losses[0] + 0.5 * losses[1]).backward()
        expected.step()
    junk = {n: batch[n].masked_fill(~batch["mask"], 1e4) for n in names}
    junk |= {"tokens": batch["tokens"].masked_fill(~batch["mask"], 12)}
    for args.batch_tokens, args.gradient_checkpointing, extra in (
        (1, False, {}), (45, False, junk), (9999, False, {}), (45, True, {})
    ):  # fmt: skip
        if args.gradient_checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": False})
            critic.gradient_checkpointing_enable({"use_reentrant": False})
        found = Gradients(policy, critic)
        script.update_models(learner, found, batch | extra, generator(), args)
        for a, b in itertools.product(range(2), range(2)):
            assert_close(found.steps[a][b], expected.steps[a][b], atol=2e-5, rtol=1e-3)
            assert expected.steps[a][b].abs().max() > 0.01
    assert len(found.steps) == 2 and not policy.training and not critic.training


def test_target_kl_ends_the_update_before_the_step_too_far(script, world, record):
    """The update, with all its epochs, ends before the optimiser step whose minibatch is farther than --target-kl; what
    is reported is of the steps that were taken."""
    events = record("update_models", "policy_loss", "value_loss")
    flags = dict(target_kl=0.03, learning_rate=1e-3, update_epochs=4, total_steps=4)
    out = train(script, world, **flags | script.new_terms_off())
    taken = set()
    for (_, steps), row in zip(minibatches_of(events), lines(out)[1:], strict=True):
        kls = []
        for step in steps:
            rows = [(a[0] - a[1], a[1] != 0) for kind, a in step if kind == "policy_loss"]
            if rows:
                d = torch.cat([x[keep] for x, keep in rows])
                kls.append((d.exp() - 1 - d).mean().item())
        number = row["charts/updates"]
        assert all(kl <= 0.03 for kl in kls[:number]) and len(steps) == number + 1
        assert (kls[number:] and kls[number] > 0.03 and len(kls) == number + 1) or number == 8
        assert row["losses/approx_kl"] == pytest.approx(sum(kls[:number]) / number, abs=1e-5)
        taken.add(number)
    if taken == {8}:
        script.gone("moves too little for this check")  # with another optimiser
    assert not script.own or min(taken) < 7 and len(taken) > 1


def test_kl_controller_is_its_definition(script):
    """coef x (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), fixed without a target (B77, CarperAI/trlx #361)."""
    for kl, factor in (
        (6.6, 1.1),
        (5.4, 0.9),
        (60.0, 1.2),
        (0.0, 0.8),
        (-9.0, 0.8),
        (7.2, 1.2),
        (6.0, 1.0),
    ):
        controller = script.KLController(0.5, 6.0, 1000)
        controller.update(kl, 1000)
        assert controller.coef == pytest.approx(0.5 * factor)
        controller.update(6.3, 100)
        assert controller.coef == pytest.approx(0.5 * factor * 1.005)
    controller = script.KLController(0.5, None, 1000)
    controller.update(60.0, 1000)
    assert controller.coef == 0.5


def test_without_a_kl_coefficient_there_is_no_reference(script, world, record):
    """--kl-coef 0 keeps and asks no reference, and shapes no reward with one."""
    events = record("sample_batch", "for_all")
    out = train(script, world, kl_coef=0.0, total_steps=2)
    assert all(learner.reference is None for learner, *_ in inputs_of(events, "sample_batch"))
    assert len(inputs_of(events, "for_all")) == 4  # policy and critic, twice
    assert out["losses/kl"] == 0 and not [name for name in lines(out)[0] if "kl" in name]


def probe(seed, world, **sizes):
    torch.manual_seed(seed)
    config = dict(n_embd=16, n_layer=1, n_head=2, n_positions=8, initializer_range=0.6, vocab_size=4)
    config |= dict(bos_token_id=None, eos_token_id=1, num_labels=1, pad_token_id=0)
    return transformers.GPT2Config(**config)


def test_shaped_rewards_are_the_objective_by_enumeration(script, world):
    """Over all 13 responses of two tokens at most: the expected sum of the shaped rewards is expected score less
    coef x KL(policy || reference), the KL that of the distributions; with the exact values the expected advantage is 0 in
    every state, and lambda does not matter to that (B65, B74, B76)."""
    models = []
    for seed in (1, 2):
        models.append(transformers.AutoModelForCausalLM.from_config(probe(seed, world)).eval())
    args = arguments(script, world, max_new_tokens=2, batch_tokens=20)
    rows = [[1, 1]] + [[a, b] for a in (0, 2, 3) for b in range(4)]
    tokens = torch.tensor(rows)
    mask = script.response_mask(tokens, [1])
    batch = {"tokens": tokens, "mask": mask, "sampled": torch.zeros(13, 2), "prompts": [[2, 3, 0]] * 13}
    logp, ref = (script.for_all(script.score, model, batch, args) for model in models)
    p = logp.double().sum(1).exp()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-6)
    every = lambda model, ids: (model(torch.tensor([ids])).logits[0, -1].double() / 0.7).log_softmax(-1)
    with torch.no_grad():
        first = [every(model, [2, 3, 0]) for model in models]
        second = {a: [every(model, [2, 3, 0, a]) for model in models] for a in (0, 2, 3)}
    kl_of = lambda pair: (pair[0].exp() * (pair[0] - pair[1])).sum()
    kl = kl_of(first) + sum(first[0][a].exp() * kl_of(second[a]) for a in second)
    score = torch.randn(13, generator=generator(4))
    shaped = script.shape_rewards(score, logp, ref, mask, 0.4)
    expected = (p * score).sum() - 0.4 * kl
    assert (p * shaped.double().sum(1)).sum().item() == pytest.approx(expected.item(), abs=1e-5)
    assert kl > 0.1
    state = {}
    for a in second:
        mine = [i for i, row in enumerate(rows) if row[0] == a]
        state[a] = ((p * shaped[:, 1])[mine].sum() / p[mine].sum()).item()
    values = torch.tensor([[expected.item(), state.get(row[0], 0.0)] for row in rows])
    for lam in (0.0, 0.5, 1.0):
        advantages, returns = script.token_advantages(shaped, values, mask, 1.0, lam)
        assert (p * advantages[:, 0]).sum().abs() < 1e-5 and advantages[0, 1] == returns[0, 1] == 0
        for a in second:
            mine = [i for i, row in enumerate(rows) if row[0] == a]
            assert (p * advantages[:, 1])[mine].sum().abs() < 1e-5
        assert (advantages[1:].abs() > 1e-3).all()
        if lam == 1.0:
            assert_close(returns, shaped.flip(1).cumsum(1).flip(1) * mask, atol=1e-5, rtol=1e-5)


# ---- the reward model ----

TEXTS = [("3=", "45"), ("1234567=", ""), ("61=", "0123456789"), ("5=", "7"), ("25=", "70"), ("777=", "777")]


@pytest.mark.parametrize("name", ["judge", "chat"])
def test_the_score_is_read_at_the_last_real_token(script, world, name):
    """With its own tokenizer and chat template (B73, huggingface/trl #1979), at the last token of the text, whatever the
    padding, the padding token or the company (B70, huggingface/trl #2778); a stop token in the prompt ends nothing (B71)."""
    tokenizer, judge = load(script, world, name)
    prompts, completions = zip(*TEXTS)
    right = torch.tensor([plain_score(judge, tokenizer, *text) for text in TEXTS])
    for tokenizer.padding_side, tokenizer.pad_token, judge.config.pad_token_id in (
        ("left", "<pad>", 0), ("right", "<eos>", 1), ("right", "3", None)
    ):  # fmt: skip
        for budget in (1, 25, 9999):
            with torch.no_grad():
                assert_close(
                    script.read_texts(judge, tokenizer, prompts, completions, budget),
                    right,
                    atol=1e-5,
                    rtol=1e-5,
                )
        for part in ([4], [2, 0], [5, 4, 3, 1]):
            texts = ([prompts[i] for i in part], [completions[i] for i in part])
            assert_close(
                script.read_texts(judge, tokenizer, *texts, 99).detach(), right[part], atol=1e-5, rtol=1e-5
            )
    assert right.std() > 0.1 and not judge.training
    if name == "chat":  # chat messages as the prompt
        messages = [{"role": "user", "content": "3="}]
        assert_close(
            script.read_texts(judge, tokenizer, [messages], ["45"], 99)[0], right[0], atol=1e-5, rtol=1e-5
        )
        assert len(messages) == 1
    else:
        ids = torch.tensor([[8, 1, 10, 2, 9]])
        alone = judge.score(judge.base_model(ids).last_hidden_state)[0, -1]
        texts = (["5" + "<eos>" + "7="], ["6"])
        assert_close(script.read_texts(judge, tokenizer, *texts, 99), alone, atol=1e-5, rtol=1e-5)


def test_an_open_answer_is_read_as_one_message(script, world):
    """A prompt whose last message is the assistant's is continued by the policy: one message for the reward model too."""
    tokenizer, judge = load(script, world, "chat")
    messages = [{"role": "user", "content": "3="}, {"role": "assistant", "content": "4"}]
    right = plain_score(judge, tokenizer, "3=", "45")
    found = script.read_texts(judge, tokenizer, [messages], ["5"], 99)
    assert found.tolist() == pytest.approx([right], abs=1e-5) and len(messages) == 2


@pytest.mark.parametrize(
    "policy_name, reward_model", [("llama", "judge"), ("llama", "chat"), ("gpt2", "judge"), ("gpt2", None)]
)
def test_where_the_value_model_starts(script, world, record, policy_name, reward_model):
    """The value model is a copy of a reward model that reads the policy's tokens, else the policy's backbone with a head
    of zeros; all of it is trained, and neither reward model nor reference is (their numbers are checked above)."""
    events = record("sample_batch")
    flags = {"reward_model": reward_model} if reward_model else {}
    out = train(script, world, policy=policy_name, total_steps=1, **flags)
    critic = inputs_of(events, "sample_batch")[0][0].critic
    weights, trained = dict(critic.named_parameters()), parts(out)["model"]
    assert {n[7:] for n in trained if n.startswith("critic.")} == set(weights)
    if (policy_name, reward_model) == ("llama", "judge"):
        expected = dict(load(script, world, "judge")[1].named_parameters())
    else:
        expected = {"score.weight": torch.zeros(1, 24)}
        backbone = load(script, world, policy_name)[1].base_model
        prefix = critic.base_model_prefix
        expected |= {f"{prefix}.{n}": p for n, p in backbone.named_parameters()}
    assert set(expected) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]) and weight.dtype == torch.float32
        moved = not torch.equal(weight, trained[f"critic.{name}"])
        assert (
            moved
            or name.endswith(("k_proj.bias", "embed_tokens.weight"))
            or name == "score.weight"
            or (expected["score.weight"] == 0).all()
        )
    assert not torch.equal(trained["critic.score.weight"], weights["score.weight"])


@pytest.fixture
def fitted(script, world, record):
    """A reward model fitted on the separable pairs; the texts read with and without gradient, the losses."""
    events = record("read_texts", "preference_loss")
    reading, read = [], script.read_texts
    tokenizer, _ = load(script, world, "llama")
    torch.manual_seed(3)
    _, judge = script.load_classifier(str(world / "llama"), new_head=True)
    pairs = script.load_pairs(str(world / "pairs.jsonl"), tokenizer)
    args = arguments(script, world, reward_learning_rate=1e-2, reward_epochs=6, max_grad_norm=1.0)

    def reader(*inputs):
        reading.append((torch.is_grad_enabled(), inputs[2], inputs[3]))
        return read(*inputs)

    script.module.read_texts, before = reader, script.module.read_texts
    metrics = script.fit_reward_model(judge, tokenizer, pairs, args)
    script.module.read_texts = before
    return tokenizer, judge, pairs, metrics, reading, events


def test_the_reward_model_learns_the_pairs(script, fitted):
    """Bradley-Terry: the loss falls, chosen answers score higher on held-out pairs, the chosen one is the first."""
    tokenizer, judge, pairs, metrics, reading, events = fitted
    losses = [x.mean().item() for x in results_of(events, "preference_loss")]
    assert losses[0] == pytest.approx(math.log(2), abs=0.7) and losses[-1] < 0.3 * losses[0]
    assert metrics["reward_model/pairs"] == 135 and metrics["reward_model/accuracy"] >= 0.8
    held_out = [plain_score(judge, tokenizer, p["prompt"], p["chosen"]) for p in pairs[:15]]
    other = [plain_score(judge, tokenizer, p["prompt"], p["rejected"]) for p in pairs[:15]]
    right = sum(a > b for a, b in zip(held_out, other)) / 15
    assert metrics["reward_model/accuracy"] == pytest.approx(right)
    rates = [rates[0] for rates in inputs_of(events, "step")]
    assert len(rates) == math.ceil(6 * 135 / 64) and rates[0] == 1e-2 and rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-2 / len(rates))


def test_held_out_pairs_are_never_trained_on(script, fitted):
    """What the accuracy is measured on was in no training batch; every other pair is in one an epoch."""
    *_, pairs, _, reading, _ = fitted
    texts = lambda gradient: {text for kind, *both in reading if kind == gradient for text in zip(*both)}
    assert len(texts(False)) > 20 and not texts(True) & texts(False)
    everything = {(p["prompt"], p[side]) for p in pairs for side in ("chosen", "rejected")}
    assert texts(True) | texts(False) == everything
    first = [text for _, *both in reading[:2] for text in zip(*both)]
    assert len(set(first)) > 0.9 * len(first)


def test_duplicate_pairs_are_not_on_both_sides(script, world, monkeypatch):
    """A pair that the file holds twice, once turned round, is held out with both or trained on with both."""
    tokenizer, judge = load(script, world, "judge")
    pairs = script.load_pairs(str(world / "pairs.jsonl"), tokenizer)[:40]
    turned = [p | {"chosen": p["rejected"], "rejected": p["chosen"]} for p in pairs]
    reading, read = [], script.read_texts
    note = lambda *a: reading.append((torch.is_grad_enabled(), a[2], a[3])) or read(*a)
    monkeypatch.setattr(script.module, "read_texts", note)
    script.fit_reward_model(judge, tokenizer, pairs + turned, arguments(script, world))
    texts = lambda gradient: {text for kind, *both in reading if kind == gradient for text in zip(*both)}
    assert texts(False) and not texts(True) & texts(False)


def test_a_reward_model_trained_in_the_run(script, world, record):
    """--train-reward-model: fitted from --policy, kept in the run's folder, used for scores and for the value model."""
    events = record("sample_batch")
    flags = dict(train_reward_model=str(world / "pairs.jsonl"), reward_learning_rate=1e-2, reward_epochs=6)
    out = train(script, world, normalize_scores=0, run_name="x", save_every=1, **flags)
    tokenizer, judge = script.load_classifier("runs/x/reward_model")
    inputs = inputs_of(events, "sample_batch")
    batches = [batch for batch, _ in results_of(events, "sample_batch")]
    assert all(torch.equal(p, q) for p, q in zip(inputs[0][0].critic.parameters(), judge.parameters()))
    for call, batch in zip(inputs, batches, strict=True):
        texts = zip(call[2], responses_of(batch))
        right = [plain_score(judge, tokenizer, row["prompt"], text_of(r)) for row, (r, _) in texts]
        assert batch["rewards"].tolist() == pytest.approx(right, abs=1e-4)
    assert lines(out)[0]["reward_model/accuracy"] >= 0.8


def test_pairs_of_the_small_world_follow_the_preference(script):
    """The chosen answer is the better one in the share that the sigmoid of the difference says; no pair has equal
    answers, both are answers to its prompt."""
    said = []

    def answers(rows, copies, *rest):
        texts = [f" farmer helps {'gladly' if (i // 2 + i) % 2 else 'badly'}" for i in range(2 * len(rows))]
        texts[:20] = [" farmer"] * 20
        repeated = [row["prompt"] for row in rows for _ in range(2)]
        scores = [float(text.endswith("gladly")) for text in texts]
        said.extend(zip(repeated, texts))
        assert copies == 2
        return {"rewards": torch.tensor(scores)}, texts

    rows, rng = [{"prompt": f"p{i}"} for i in range(500)], script.np.random.default_rng(0)
    sampler = SimpleNamespace(task=SimpleNamespace(rows=rows), respond=answers)
    pairs = script.sample_pairs(sampler, rng, script.Args(num_pairs=4000))
    count = 4000 - 10 * len(range(0, 4000, 256))
    assert len(pairs) == count and len(said) == 8000
    right = sum(p["chosen"].endswith("gladly") for p in pairs) / count
    assert right == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    assert all((p["truth"] > 0) == p["chosen"].endswith("gladly") for p in pairs)
    assert all(
        (p["prompt"], p["chosen"]) in said and (p["prompt"], p["rejected"]) in said for p in pairs[:300]
    )


# ---- scores ----


def test_scores_that_do_not_vary_are_not_blown_up(script, world, record):
    """If all scores of the starting policy are equal there is nothing to divide by: later scores keep their size."""
    events = record("shape_rewards")
    train(script, world, reward="rare")
    assert max(inputs[0].abs().max() for inputs in inputs_of(events, "shape_rewards")) < 10


@pytest.mark.parametrize("reward", ["holes", "first_hole"])
def test_a_missing_score_leaves_the_batch(script, world, record, reward):
    """A response with None or NaN is in no batch, and the normalisation is of the others (B85)."""
    events = record("sample_batch", "normalisation")
    train(script, world, reward=reward, normalize_scores=0 if reward == "holes" else 20)
    rewards = [rewards for *_, rewards in seen()]
    if reward == "first_hole":
        (found,) = results_of(events, "normalisation")
        scored = [r for r in rewards.pop(0) if r is not None]
        assert len(scored) == 19 and found["mean"] == pytest.approx(sum(scored) / 19)
    for (batch, charts), given in zip(results_of(events, "sample_batch"), rewards, strict=True):
        scored = [r for r in given if r is not None]
        assert batch["rewards"].tolist() == pytest.approx(scored) and len(batch["tokens"]) == len(scored)
        assert charts["charts/unscored"] == pytest.approx(1 - len(scored) / len(given))
    assert reward == "first_hole" or any(None in given for given in rewards)


# ---- runs ----


def equal_runs(a, b):
    """Weights, optimiser state, random streams, coefficients, metrics and completions agree to the bit."""

    def flat(x):
        values = x.values() if isinstance(x, dict) else x if isinstance(x, list) else None
        return [x] if values is None else [y for value in values for y in flat(value)]

    for x, y in zip(*(flat(parts(out)) for out in (a, b)), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert lines(a) == lines(b) and lines(a, "completions") == lines(b, "completions")


KEYS = """losses/policy_loss losses/value_loss losses/approx_kl losses/clipfrac losses/grad_norm losses/value_grad_norm
losses/kl losses/kl_per_token losses/entropy losses/mismatch losses/explained_variance charts/score charts/objective
charts/response_length charts/eos_share charts/distinct charts/tokens charts/updates charts/learning_rate charts/kl_coef charts/unscored
charts/TPS charts/SPS time/rollout time/update time/cpu"""
EVAL = "score eos_share response_length kl distinct distinct_2"


def test_same_seed_same_run(script, world):
    """Two runs of one seed agree to the bit, another seed does not; evaluation draws from a stream of its own and moves
    nothing; metrics.jsonl has its keys."""
    a, b, c = (
        train(script, world, seed=seed, run_name=name) for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    )
    equal_runs(a, b)
    assert lines(a)[1:] != lines(c)[1:]
    d = train(script, world, run_name="d", eval_every=1)
    strip = lambda rows: [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]
    assert strip(lines(a)) == strip(lines(d)) and all("eval/score" in row for row in lines(d))
    weights = parts(a)["model"]
    assert all(torch.equal(p, weights[name]) for name, p in parts(d)["model"].items())
    rows = [json.loads(line) for line in open("runs/a/metrics.jsonl")]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 3]
    evaluated = {"step", *(f"eval/{name}" for name in EVAL.split())}
    assert set(rows[0]) - set(CLOCK) == evaluated
    if script.own:
        assert set(rows[2]) == set(rows[3]) == {"step", *KEYS.split()} and set(rows[4]) == evaluated
    assert rows[1]["losses/approx_kl"] > 0 and rows[1]["losses/mismatch"] < 1e-5
    assert {p for prompts, *_ in seen(held_out=True) for p in prompts} == {f"9{i}=" for i in range(6)}
    last = seen(held_out=True)[-1][2]
    assert d["eval/score"] == pytest.approx(sum(last) / 6)
    records = [row for row in lines(d, "completions") if row["step"] == 3]
    assert [row["score"] for row in records] == last and len(lines(d, "completions")) == 24


KINDS = [
    ("signal", dict(kl_target=1.0, kl_horizon=40)),
    ("raise", dict(policy="gpt2", anneal_lr=True, warmup_steps=3)),
    ("raise", dict(kl_coef=0.1, lora_rank=2)),
    ("signal", dict(dtype="bfloat16", eval_every=1)),
]


@pytest.mark.parametrize("how, flags", KINDS, ids=str)
def test_stopped_and_resumed_equals_uninterrupted(script, world, how, flags):
    """After SIGTERM (exit code 143, a checkpoint of that step) or a crash (the last checkpoint) a resumed run is the
    uninterrupted one to the bit, value model, coefficient and score normalisation included (B77); later lines go."""
    if "lora_rank" in flags:
        pytest.importorskip("peft")
    flags = dict(total_steps=5, save_every=2 if how == "raise" else 100, run_name="x", **flags)
    whole = train(script, world, **flags)
    os.rename("runs/x", "runs/whole")
    whole["folder"] = "runs/whole"
    calls = [(p[0][0] == "9") for p, *_ in map(json.loads, open("seen.jsonl"))]
    steps = [i for i, held_out in enumerate(calls) if not held_out][1:]  # the first is the normalisation
    Path("stop").write_text(f"{how} {steps[2 if how == 'signal' else -1] + 1}")
    with pytest.raises(SystemExit) as stop:
        train(script, world, **flags)
    assert stop.value.code == (128 + signal.SIGTERM if how == "signal" else 7) and not os.path.exists("stop")
    state = torch.load("runs/x/checkpoint.pt", weights_only=True)
    assert state["step"] == (4 if how == "raise" else 3) and state["parts"]["norm"]["mean"] != 0
    assert (state["parts"]["kl_coef"] != 0.3) == ("kl_target" in flags or "lora_rank" in flags)
    with open("runs/x/metrics.jsonl", "a") as file:
        file.write('{"step": 99}\n{"step": 4, "losses/po')  # later and torn lines must go
    resumed = script.main(script.parse_args(["--resume", "runs/x", "--device", "cpu"]))
    equal_runs(whole, resumed)


def test_nan_stops_the_run_and_keeps_the_good_checkpoint(script, world, monkeypatch):
    """A gradient of NaN, of the policy or of the value model, or weights of NaN end the run with the step and the last
    good checkpoint, which is whole (B85)."""
    rollout, calls = script.sample_batch, []
    monkeypatch.setattr(script.module, "sample_batch", lambda *a: calls.append(1) or rollout(*a))
    for name in ("policy_loss", "value_loss"):
        loss = getattr(script, name)
        calls.clear()
        with monkeypatch.context() as patch:
            bad = lambda *a, loss=loss: loss(*a) * (1.0 if len(calls) < 3 else math.nan)
            patch.setattr(script.module, name, bad)
            message = f"stopped at step 3: the gradient .*runs/{name}/checkpoint.pt, step 2"
            with pytest.raises(FloatingPointError, match=message):
                train(script, world, save_every=1, run_name=name)
        state = torch.load(f"runs/{name}/checkpoint.pt", weights_only=True)
        assert state["step"] == 2 and all(p.isfinite().all() for p in state["parts"]["model"].values())

    def poison(learner, *rest):
        next(learner.policy.parameters()).data.fill_(math.nan)
        return rollout(learner, *rest)

    monkeypatch.setattr(script.module, "sample_batch", poison)
    with pytest.raises(FloatingPointError, match="stopped at step 1: .*logits .* none yet"):
        train(script, world, run_name="z")


def test_the_bfloat16_sampler_has_the_weights_of_the_policy(script, world, record):
    """With --dtype bfloat16 each step samples from a rounded copy of the current weights (B112, B116); scores and values
    come from the float32 weights under autocast."""
    events = record("sample_batch")
    out = train(script, world, dtype="bfloat16")
    for learner, sampler, *_ in inputs_of(events, "sample_batch"):
        copied, policy = sampler.source.parameters(), learner.policy.parameters()
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(copied, policy, strict=True))
        models = learner.policy, learner.critic
        assert all(p.dtype == torch.float32 for model in models for p in model.parameters())
    assert 0 < out["losses/mismatch"] < 0.1


@pytest.mark.parametrize("own_file", [True, False])
def test_held_out_prompts_are_never_trained_on(script, world, own_file):
    """The rows of --eval-prompts, or the last ones of --prompts, reach no training step nor the normalisation,
    duplicates included."""
    rows = (world / "data.jsonl").read_text().splitlines(keepends=True)
    held_out = {json.loads(row)["prompt"] for row in rows[-6:]}
    Path("data.jsonl").write_text("".join(rows[-6:] * 2 + rows if not own_file else rows))
    Path("held.jsonl").write_text("".join(rows[-6:]))
    train(script, world, prompts="data.jsonl", eval_prompts="held.jsonl" if own_file else None)
    assert {p for prompts, *_ in seen(held_out=True) for p in prompts} == held_out
    assert len(seen(held_out=True)) == 2 and len(seen()) == 4


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_saved_model_is_the_trained_one(script, world, record, lora_rank):
    """runs/<name>/model loads with transformers alone and gives the log-probabilities of the last policy."""
    if lora_rank:
        pytest.importorskip("peft")
    events = record("evaluate_policy")
    folder = train(script, world, learning_rate=2e-2, lora_rank=lora_rank)["folder"]
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/model")
    first, last = (learner.policy for learner, *_ in inputs_of(events, "evaluate_policy"))
    ids = tokenizer("1234=567").input_ids
    with torch.no_grad():
        found, right, old = (m(torch.tensor([ids])).logits for m in (model, last, first))
    assert_close(found, right, atol=1e-4, rtol=1e-4)
    assert (right - old).abs().max() > 0.1


def test_dropout_is_off_and_checkpointing_changes_nothing(script, world, monkeypatch):
    """Dropout in the checkpoint's config is switched off in every pass, of the value model too (B86, verl-project/verl
    #4708); recomputed activations give the same weights."""
    block = transformers.models.gpt2.modeling_gpt2.GPT2MLP
    forward, calls = block.forward, []
    monkeypatch.setattr(block, "forward", lambda *a: calls.append(1) or forward(*a))
    weights, counts = [], []
    for name, flags in (("gpt2", {}), ("dropout", {}), ("dropout", dict(gradient_checkpointing=True))):
        calls.clear()
        out = train(script, world, policy=name, total_steps=2, run_name=f"{len(weights)}", **flags)
        weights.append(parts(out)["model"])
        counts.append(len(calls))
    assert all(torch.equal(p, weights[0][name]) for name, p in weights[1].items())
    error = torch.cat([(p - weights[0][name]).abs().flatten() for name, p in weights[2].items()])
    assert (error < 1e-5).float().mean() > 0.99 and counts[2] > counts[0] == counts[1]


def test_self_check_names_what_is_broken(script, world, monkeypatch):
    """A wrong temperature (B59, B115), wrong positions (B62) or another reference (B88) end the run before its first
    update with a sentence; without the checks it runs on."""
    logps, load_model, deepcopy = script.token_logps, script.load_model, copy.deepcopy

    def shifted(name):
        tokenizer, model = load_model(name)
        forward = model.forward
        late = lambda use_cache, position_ids, **_: {"position_ids": position_ids + (not use_cache)}
        model.forward = lambda *inputs, **named: forward(*inputs, **{**named, **late(**named)})
        return tokenizer, model

    def other(model):
        out = deepcopy(model)
        if hasattr(out, "lm_head"):
            next(out.parameters()).data.mul_(1.5)
        return out

    fake = type("copy", (), {"deepcopy": staticmethod(other)})
    for name, broken, message in (
        ("token_logps", lambda logits, tokens, _: logps(logits, tokens, 1.0), "sampled and as scored"),
        ("load_model", shifted, "sampled and as scored"),
        ("copy", fake, "the reference differs"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(script.module, name, broken)
            flags = dict(policy="gpt2", total_steps=1)
            with pytest.raises(script.UsageError, match=f"stopped at step 1: self-check: .*{message}"):
                train(script, world, run_name=name, **flags)
            train(script, world, self_checks=False, **flags)


# ---- learning ----


def test_learns_a_task_whose_optimum_is_known(script, world):
    """One token, rewarded if it is a 5: from chance (below 0.3) to nearly always; approximate KL is 0 in the first
    minibatch, small and rising over the epochs (the published plumbing check)."""
    flags = dict(total_steps=25, max_new_tokens=1, learning_rate=1e-2, temperature=1.0, kl_coef=0.01)
    train(script, world, reward="five", missing_eos_penalty=0.0, **flags)
    rewards = [sum(rewards) / len(rewards) for *_, rewards in seen()]
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-5:]) / 5 > 0.9


def test_plumbing_figures(script, world, record):
    """Of the first batch the first minibatch has ratio 1 and approximate KL 0; then the KL is small and rises from epoch
    to epoch (the reference output of summarize_from_feedback_details: .0029, .0056, .0081 after epochs 1 to 3)."""
    events = record("update_models", "policy_loss", "value_loss")
    train(
        script, world, total_steps=1, update_epochs=4, learning_rate=5e-4, temperature=1.0, batch_tokens=9999
    )
    ((_, steps),) = minibatches_of(events)
    ratios = [(a[0] - a[1])[a[1] != 0].exp() for step in steps for kind, a in step if kind == "policy_loss"]
    kls = [(r - 1 - r.log()).mean().item() for r in ratios]
    assert len(kls) == 8 and (ratios[0] - 1).abs().max() < 1e-5 and kls[0] < 1e-9
    epochs = [(kls[i] + kls[i + 1]) / 2 for i in range(0, 8, 2)]
    assert epochs == sorted(epochs) and 1e-5 < epochs[1] and epochs[3] < 0.1


def test_the_small_world_learns(script, monkeypatch, record):
    """All three stages, cut short: the reward model is right about held-out pairs, its score rises clearly within a few
    steps; no held-out prompt is in a supervised text, a pair or a batch; the folder holds start and reward model."""
    events = record("prompts_of", "sample_pairs", "sample_batch")
    finetune, asked, trained = script.supervised_finetune, [], []
    held, pad = script.is_held_out, script.token_logps
    note = lambda logits, tokens, t: trained.append(len(tokens)) or pad(logits, tokens, t)

    def start(*inputs):
        with monkeypatch.context() as patch:
            patch.setattr(script.module, "is_held_out", lambda text: asked.append(held(text)) or asked[-1])
            patch.setattr(script.module, "token_logps", note)
            finetune(*inputs, steps=60, batch_size=32)

    monkeypatch.setattr(script.module, "supervised_finetune", start)
    flags = script.BUILT_IN | dict(total_steps=9, num_pairs=256, num_eval=64, eval_every=0, num_prompts=64)
    flags |= dict(learning_rate=1e-3, value_learning_rate=2e-3, normalize_scores=64, reward_epochs=4)
    flags |= script.new_terms_off()
    out = script.main(script.Args(**flags, device="cpu", run_name="x"))
    rows = lines(out)
    assert rows[0]["reward_model/accuracy"] >= 0.5 and "reward_model/noiseless" in rows[0]
    score = [row["charts/score"] for row in rows[1:]]
    spread = parts(out)["norm"]["std"]
    assert sum(score[-3:]) / 3 > sum(score[:3]) / 3 + 0.5 * spread, (score, spread)
    assert rows[-1]["eval/score"] > rows[0]["eval/score"] + 0.3 * spread
    assert all(f"eval/{name}" in rows[0] for name in [*EVAL.split(), "true_preference"])
    tokenizer, judge = script.load_classifier("runs/x/reward_model")
    policy = transformers.AutoModelForCausalLM.from_pretrained("runs/x/start")
    assert policy.config.vocab_size == len(tokenizer) and judge.num_labels == 1
    ((known, held_out),) = results_of(events, "prompts_of")
    held_out, known = ({row["prompt"] for row in part} for part in (held_out, known))
    assert len(held_out) == 64 and not held_out & known and all(map(held, held_out))
    used = {row["prompt"] for inputs in inputs_of(events, "sample_batch") for row in inputs[2]}
    (pairs,) = results_of(events, "sample_pairs")
    for pair in pairs:
        prompts, sides = [pair["prompt"]] * 2, [pair["chosen"], pair["rejected"]]
        better, worse = script.hidden_preference(prompts, sides, [{}] * 2)
        assert pair["truth"] == better - worse
    used |= {pair["prompt"] for pair in pairs}
    assert used <= known and len(used) > 400 and not any(map(held, known))
    assert len(asked) == 60 * 32 and sum(trained) == 60 * 32 - sum(asked) and sum(asked) > 50
