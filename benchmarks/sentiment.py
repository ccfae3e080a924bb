"""A reward without a model for ppo_rlhf.py: sentiment by VADER's lexicon, and prompts to go with it.

    pip install vaderSentiment
    python benchmarks/sentiment.py prompts.jsonl
    python ppo_rlhf.py --policy FOLDER/model --prompts prompts.jsonl --no-chat-template \\
      --reward benchmarks/sentiment.py:compound --max-new-tokens 16

FOLDER is what smollm2.py makes. The prompts ask SmolLM2, in its chat format, to describe 600 everyday things
in one sentence; each time the same file, in random order. Source: Hutto and Gilbert 2014, VADER.
"""

import functools
import json
import random
import sys

KINDS = """old small quiet long cold empty busy narrow wooden dark red ordinary new tall wet heavy plain
distant broken open""".split()
THINGS = """street bridge dog teacher kitchen river letter train garden winter market storm doctor school
window village meeting journey house road book song dinner cat field shop boat room story morning""".split()
FORM = "<|im_start|>user\nDescribe {} {} {} in one sentence.<|im_end|>\n<|im_start|>assistant\n"


@functools.cache
def analyzer():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def compound(prompts, completions, rows):
    """VADER's compound score of each completion, from -1 (negative) to 1 (positive)."""
    return [analyzer().polarity_scores(text)["compound"] for text in completions]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    pairs = [(kind, thing) for kind in KINDS for thing in THINGS]
    random.Random(0).shuffle(pairs)
    with open(sys.argv[1], "w") as file:
        for kind, thing in pairs:
            prompt = FORM.format("an" if kind[0] in "aeo" else "a", kind, thing)
            file.write(json.dumps({"prompt": prompt}) + "\n")


if __name__ == "__main__":
    main()
