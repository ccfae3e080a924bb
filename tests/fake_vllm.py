"""What the scripts use of vLLM, for machines without it: a stand-in for the module `vllm`, and just as treacherous.

Held against vLLM 0.32.0 by tests/test_engine.py, which runs on the real one where that is installed:
 - `logprobs_mode` is "raw_logprobs" unless told: log-probabilities before the temperature;
 - what was computed for a prompt is kept and used again, also with other weights, until `reset_prefix_cache`;
 - the i-th response to a prompt is drawn with the seed + i;
 - `load_format="dummy"` makes random weights, and `reload_weights` takes those that it is given;
 - a response may end early: at `max_model_len`, or because the request was aborted;
 - greedy sampling refuses more than one response.
"""

import dataclasses
import sys
import types

import torch
import transformers


@dataclasses.dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    max_tokens: int = 16
    stop_token_ids: list | None = None
    logprobs: int | None = None
    seed: int | None = None
    detokenize: bool = True

    def __post_init__(self):
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")


class LLM:
    """One engine; the class attributes are what a test makes it do wrong."""

    lost: tuple = ()  # weights that do not arrive
    shift: float = 0.0  # the engine's logits are those of the model times 1 + shift
    aborts: bool = False  # the last request is broken off after its first token
    started: list = []  # every engine made

    def __init__(
        self, model, load_format="auto", skip_tokenizer_init=False, dtype="auto", seed=0, max_model_len=None,
        gpu_memory_utilization=0.92, logprobs_mode="raw_logprobs", generation_config="auto",
        distributed_executor_backend=None,
    ):  # fmt: skip
        assert skip_tokenizer_init and generation_config == "vllm"
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(model)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        if load_format == "auto":
            stored = transformers.AutoModelForCausalLM.from_pretrained(model)
            self.model.load_state_dict(stored.state_dict())
        for parameter in self.model.parameters() if load_format == "dummy" else ():
            parameter.data.uniform_(-1e-3, 1e-3)
        self.mode, self.longest, self.kept, self.memory = (
            logprobs_mode,
            max_model_len,
            {},
            gpu_memory_utilization,
        )
        self.asked = []
        type(self).started.append(self)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        own = dict(self.model.named_parameters())
        for name, weight in kwargs["weights_iterator"]:
            if name not in self.lost:
                own[name].data.copy_(weight)

    def reset_prefix_cache(self):
        self.kept.clear()
        return True

    def generate(self, prompts, sampling_params, use_tqdm=True):
        self.asked += sampling_params
        requests = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            ids = prompt["prompt_token_ids"]
            outputs = [self.answer(ids, params, index) for index in range(params.n)]
            requests.append(types.SimpleNamespace(outputs=outputs[::-1]))
        if self.aborts:
            answer = requests[-1].outputs[0]
            answer.token_ids, answer.logprobs, answer.finish_reason = [4], answer.logprobs[:1], "abort"
        return requests

    @torch.no_grad()
    def answer(self, prompt, params, index):
        generator = torch.Generator().manual_seed((params.seed + index) % 2**63)
        ids, said, reason = list(prompt), [], "length"
        tokens = []
        for step in range(min(params.max_tokens, self.longest - len(prompt))):
            if step == 0 and tuple(prompt) in self.kept:
                logits = self.kept[tuple(prompt)]
            else:
                logits = self.model(torch.tensor([ids])).logits[0, -1].float() * (1 + self.shift)
            if step == 0:
                self.kept[tuple(prompt)] = logits
            every = (logits / (params.temperature or 1.0)).log_softmax(-1)
            token = int(every.argmax())
            if params.temperature:
                token = int(torch.multinomial(every.exp(), 1, generator=generator))
            shown = every if self.mode == "processed_logprobs" else logits.log_softmax(-1)
            said.append({token: types.SimpleNamespace(logprob=shown[token].item())})
            tokens.append(token)
            ids.append(token)
            if token in (params.stop_token_ids or ()):
                reason = "stop"
                break
        return types.SimpleNamespace(index=index, token_ids=tokens, logprobs=said, finish_reason=reason)


def install(monkeypatch):
    """Put the stand-in in the place of vllm. Returns its LLM."""
    module = types.ModuleType("vllm")
    module.__spec__ = types.SimpleNamespace(name="vllm", origin=__file__)
    module.LLM = type("LLM", (LLM,), {"started": []})
    module.SamplingParams = SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module.LLM
