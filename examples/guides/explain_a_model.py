# SPDX-License-Identifier: Apache-2.0
"""Show which matmuls of a Hugging Face model would be quantized, and why others would not.

    python examples/guides/explain_a_model.py                      # a small Llama
    python examples/guides/explain_a_model.py --model FOLDER --page report.html

The weights are random and nothing is trained, so the folder needs only a config.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import q2compile

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a folder with a config.json, or a name on Hugging Face")
    parser.add_argument("--layers", type=int, help="use only so many layers; default: all")
    parser.add_argument("--tokens", type=int, default=64, help="sequence length; default 64")
    parser.add_argument("--options", type=json.loads, default={}, help="backend options, as JSON")
    parser.add_argument("--page", help="also write the report as an HTML page")
    args = parser.parse_args(argv)

    config = AutoConfig.from_pretrained(args.model) if args.model else SMALL
    if args.layers:
        config.num_hidden_layers = args.layers
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(config.vocab_size, (1, args.tokens))

    report = q2compile.explain(model, input_ids=tokens, labels=tokens, options=args.options)
    print(report)
    if args.page:
        report.to_html(args.page)
        print(f"wrote {args.page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
