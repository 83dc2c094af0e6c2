"""A byte-level BPE tokenizer of 1,024 tokens, saved in the Hugging Face fast format.

All 256 bytes are in the vocabulary, so every text survives encoding and decoding unchanged.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 1024
BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
BOS_ID, EOS_ID, PAD_ID, MASK_ID = range(4)

# The model continues code and knows no roles: a conversation is the text of its messages, one after
# the other with the system's first, and the model goes on from the end of the last one. Whitespace at
# that end is dropped, as a word's token includes the space before it and a line's the line break.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is not none and content is iterable -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}{%- elif part.text is defined -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set ordered = (messages | selectattr("role", "equalto", "system") | list)
    + (messages | rejectattr("role", "equalto", "system") | list) -%}
{%- macro turn(message) -%}
{{- text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- "\\n" if message.content else "" }}{{ call.function.name -}}
({{ arguments if arguments is string else arguments | tojson }})
{%- endfor -%}
{%- endmacro -%}
{%- for message in ordered -%}
{{- turn(message).rstrip() if loop.last else turn(message) + "\\n" -}}
{%- endfor -%}
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from texts and wrap them with special tokens and the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BOS, EOS, PAD, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the template inside the latter."""
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release knows
    config_file.write_text(json.dumps(config, indent=2) + "\n")
