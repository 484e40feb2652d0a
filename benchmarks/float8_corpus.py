"""A corpus from text that every machine has: the Python sources of the standard library and of the installed packages.

Each file is a document that ends with token 0; documents of more than 2,048 tokens are cut. The tokens are those of a
byte-level BPE, trained on the same files. Files with the same content count once, and large ones, which are mostly
tables, are left out. The order of the files is random, but the same for a seed. The output is an `.npz` with `ids` of all
documents, their `lengths`, and the `vocab_size`.

    python benchmarks/float8_corpus.py --output corpus.npz
"""

import argparse
import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


MAX_LENGTH = 2048
END = "<|endoftext|>"
_LARGEST_FILE = 200_000
# Of the files that the BPE trains on, so that they are about those of the corpus.
_CHARACTERS_PER_TOKEN = 4


def source_files() -> list[Path]:
    """All Python files below the standard library and below the installed packages, in the order of their paths there."""
    paths = sysconfig.get_paths()
    packages = {"site-packages", "dist-packages"}
    found = []
    for folder in (Path(paths["stdlib"]), Path(paths["purelib"])):
        files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))
        found += [path for name, path in files if packages.isdisjoint(name.split("/"))]
    return found


def texts(files: Iterable[Path]) -> Iterator[str]:
    """The text of each file; none for a file that is empty, large, not UTF-8, or a copy of an earlier one."""
    seen = set()
    for path in files:
        if not 0 < path.stat().st_size <= _LARGEST_FILE:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            yield content.decode()
        except UnicodeDecodeError:
            continue


def train_tokenizer(files: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(files, trainer)
    return tokenizer


def first_files(files: Iterable[str], size: int) -> list[str]:
    """As many of the first files as have `size` characters."""
    found = []
    for text in files:
        if size <= 0:
            break
        found.append(text)
        size -= len(text)
    return found


def documents(tokenizer: Tokenizer, files: Iterable[str], tokens: int) -> Iterator[list[int]]:
    """Documents of `tokens` tokens in total; the last one is cut to that."""
    for text in files:
        ids = [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)][:tokens]
        tokens -= len(ids)
        yield from (ids[start : start + MAX_LENGTH] for start in range(0, len(ids), MAX_LENGTH))
        if not tokens:
            return


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6_000_000)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the files")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    files = source_files()
    random.Random(args.seed).shuffle(files)
    sample = first_files(texts(files), args.tokens * _CHARACTERS_PER_TOKEN)
    tokenizer = train_tokenizer(sample, args.vocab_size)
    made = list(documents(tokenizer, texts(files), args.tokens))
    lengths = np.array([len(document) for document in made], dtype=np.int32)
    ids = np.concatenate([np.array(document, dtype=np.uint16) for document in made])
    np.savez_compressed(args.output, ids=ids, lengths=lengths, vocab_size=tokenizer.get_vocab_size())
    ends = int((ids == tokenizer.token_to_id(END)).sum())
    print(
        f"{ends:,} whole files of {len(files):,}, {len(lengths):,} documents, {len(ids):,} tokens; "
        f"BPE of {tokenizer.get_vocab_size():,} tokens from {len(sample):,} files; "
        f"{args.output.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
