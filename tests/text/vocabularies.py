"""Two small tokenizers built in memory: byte-level, and SentencePiece-like with byte fallback."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from diptych.text.tokenizer import Tokenizer

END = "<|im_end|>"
MERGED = (
    "he",
    "hel",
    "lo",
    "hello",
    "th",
    "the",
    "an",
    "and",
    "st",
    "sto",
    "stop",
    "op",
    "\u0120a",
)


def byte_level() -> Tokenizer:
    """256 bytes, a few merges, one special token: characters past ASCII span tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    merges = []
    for token in MERGED:
        cut = max(c for c in range(1, len(token)) if token[:c] in vocab and token[c:] in vocab)
        merges.append((token[:cut], token[cut:]))
        vocab[token] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    return Tokenizer(inner)


def sentence_piece() -> Tokenizer:
    """Letters, the space mark and all bytes as `<0xNN>`."""
    symbols = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    symbols += [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens([END])
    return Tokenizer(inner)


def word_level() -> Tokenizer:
    """A decoder that is not bytewise: words joined by spaces."""
    words = ["[UNK]", "stop", "##ping", "the", "car", "!", "now"]
    vocab = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    inner.add_special_tokens([END])
    return Tokenizer(inner)
