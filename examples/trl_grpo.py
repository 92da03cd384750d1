"""A real TRL GRPO job that shares its accelerator: the lines of coslice are marked.

    coslice up --memory 64MiB &
    coslice run --job a -- python examples/trl_grpo.py --seed 1 &
    coslice run --job b -- python examples/trl_grpo.py --seed 2

A tiny model from scratch, so that it runs on any machine, without a download: it learns to answer with
letters in order. Rewards are plain Python that waits like a sandbox would (``--reward-s``). The last line
tells the digest of the trained weights, which is the same alone and shared, and when the trainer computed
(``tools/trl_duty.py`` reads that). Needs: pip install 'coslice[trl]'.
"""

import argparse
import hashlib
import itertools
import json
import os
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import coslice
from coslice.integrations.trl import share

LETTERS = "abcdefgh"


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def model(words: PreTrainedTokenizerFast, width: int) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=256, help="hidden size; 256 is about 5 MiB of weights")
    parser.add_argument("--batch", type=int, default=8, help="answers per step")
    parser.add_argument("--letters", type=int, default=8, help="the longest answer")
    parser.add_argument("--reward-s", type=float, default=0.5, help="how long a batch is scored")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    words = tokenizer()
    policy = model(words, options.width)

    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.monotonic(), time.thread_time()))

    def in_order(completions: list[str], **_: object) -> list[float]:
        mark()
        time.sleep(options.reward_s)  # the sandbox: off the accelerators
        mark()
        return [float(sum(a < b for a, b in itertools.pairwise(text))) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=in_order,
            processing_class=words,
            train_dataset=Dataset.from_list([{"prompt": letter * 4} for letter in LETTERS] * 64),
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                seed=options.seed,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                num_generations=4,
                max_completion_length=options.letters,
                learning_rate=1e-3,
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=options.steps,
            ),
        )
        share(trainer)  # ← coslice
        mark()
        trainer.train()
        mark()
    digest = hashlib.sha256()
    with coslice.connect().on_accelerators(phase="digest"):  # ← coslice: the weights may be elsewhere
        for name, value in sorted(policy.state_dict().items()):
            digest.update(name.encode() + value.detach().numpy().tobytes())
    # Between two rewards the trainer computes: begin, end and processor time of each stretch.
    pairs = zip(marks[::2], marks[1::2], strict=True)
    stretches = [(begin, end, spent - before) for (begin, before), (end, spent) in pairs]
    seconds = round(marks[-1][0] - marks[0][0], 2)
    print(json.dumps({"digest": digest.hexdigest(), "seconds": seconds, "computed": stretches}))


if __name__ == "__main__":
    main()
