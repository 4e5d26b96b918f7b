"""Builds the demo checkpoint's tokenizer, chat template and processor settings.

The tokenizer follows Gemma: spaces become "▁", a BPE model without a pre-tokenizer for whitespace alone, the real
names of the special tokens. It has no merges: a word is either in the vocabulary whole or spelled in single letters,
so every choice that a caption or story makes is exactly one token. All printable ASCII characters are in it.
"""

import json
import pathlib
import random
import re

import questions

CANVAS = 32
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>",
           "<|channel>", "<channel|>", "<|think|>", "<|video|>", "<|audio|>", "<|tool>", "<tool|>", "<|tool_call>",
           "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
PAD, EOS, BOS = 0, 1, 2
TURN, END_TURN = SPECIAL.index("<|turn>"), SPECIAL.index("<turn|>")
IMAGE_BEGIN, IMAGE, IMAGE_END = SPECIAL.index("<|image>"), SPECIAL.index("<|image|>"), SPECIAL.index("<image|>")
PIECE = r"▁?[A-Za-z]+|▁?[0-9]|▁|[^▁]"  # one word with the space before it, one digit, or one other character

CHAT_TEMPLATE = """\
{%- macro text_of(message) -%}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'image' -%}{{- '<|image|>' -}}{%- endif -%}
    {%- endfor -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
  {%- for piece in text.split('<|channel>') -%}
    {%- if loop.first -%}{{- piece -}}
    {%- elif '<channel|>' in piece -%}{{- piece.split('<channel|>', 1)[1] -}}
    {%- endif -%}
  {%- endfor -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set first_is_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{%- if first_is_system or enable_thinking -%}
  {{- '<|turn>system\\n' -}}
  {%- if enable_thinking -%}{{- '<|think|>' -}}{%- endif -%}
  {%- if first_is_system -%}{{- text_of(messages[0]) | trim -}}{%- endif -%}
  {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if not (loop.first and first_is_system) -%}
    {%- if message['role'] in ['assistant', 'model'] -%}
      {{- '<|turn>model\\n' + without_thoughts(text_of(message)) | trim -}}
    {%- else -%}
      {{- '<|turn>' + message['role'] + '\\n' + text_of(message) | trim -}}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


def words():
    """Every whole word of the vocabulary, with "▁" where it follows a space."""
    seen = set()
    for text in questions.corpus(random.Random(1)):
        seen.update(p for p in re.findall(PIECE, text.replace(" ", "▁")) if len(p) > 1)
    seen |= {"user", "model", "system", "thought"} | {f"▁{d}" for d in range(10)}
    return sorted(seen)


def vocabulary():
    """Token -> id: special tokens, newline and printable ASCII, words, and unused ones up to a multiple of 32."""
    single = ["\n", "▁"] + [chr(c) for c in range(33, 127)]
    tokens = SPECIAL + single + words()
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 32)]
    return {t: i for i, t in enumerate(tokens)}


def build_tokenizer():
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tok = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], unk_token="<unk>", fuse_unk=False, ignore_merges=True))
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tok


def save(folder):
    """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and the processor's settings."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    names = dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>")
    extra = dict(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>", video_token="<|video|>",
                 audio_token="<|audio|>", sot_token="<|turn>", eot_token="<turn|>", think_token="<|think|>",
                 soc_token="<|channel>", eoc_token="<channel|>", std_token="<|tool>", etd_token="<tool|>",
                 stc_token="<|tool_call>", etc_token="<tool_call|>", str_token="<|tool_response>",
                 etr_token="<tool_response|>", escape_token='<|"|>')
    write(folder / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", processor_class="Gemma4Processor", backend="tokenizers",
        clean_up_tokenization_spaces=False, model_max_length=4096, padding_side="left", **names,
        **extra, extra_special_tokens=extra))
    write(folder / "special_tokens_map.json", names)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    image = dict(image_processor_type="Gemma4ImageProcessor", do_convert_rgb=True, do_normalize=False, do_rescale=True,
                 do_resize=True, image_mean=[0.0, 0.0, 0.0], image_std=[1.0, 1.0, 1.0], max_soft_tokens=70,
                 patch_size=16, pooling_kernel_size=3, resample=3, rescale_factor=1 / 255)
    write(folder / "preprocessor_config.json", dict(image, processor_class="Gemma4Processor"))
    write(folder / "processor_config.json", dict(processor_class="Gemma4Processor", image_seq_length=70,
                                                 image_processor=image))


def write(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class Encoder:
    """Turns conversations into token rows just as the chat template does, only faster (no template, cached)."""

    def __init__(self, tokenizer):
        self.tokenizer, self.cache = tokenizer, {}
        self.newline = tokenizer.token_to_id("\n")
        self.user, self.model = tokenizer.token_to_id("user"), tokenizer.token_to_id("model")

    def text(self, text):
        ids = self.cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self.cache) < 20000:
                self.cache[text] = ids
        return ids

    def turn(self, role, ids):
        return [TURN, role, self.newline, *ids, END_TURN, self.newline]

    def prompt(self, question, soft=(), history=()):
        """Ids up to the place where the answer starts.

        soft:    for each picture the list of ids that stand for its soft tokens (IMAGE, or the trainer's own marks)
        history: earlier Questions with their answers; the pictures belong to the first turn
        """
        ids, pending = [BOS], [t for marks in soft for t in (IMAGE_BEGIN, *marks, IMAGE_END)]
        for q in history:
            ids += self.turn(self.user, pending + self.text(q.text)) + self.turn(self.model, self.text(q.answer))
            pending = []
        return ids + self.turn(self.user, pending + self.text(question)) + [TURN, self.model, self.newline]

    def canvases(self, answer):
        """The answer cut into canvases of 32; after the end of the turn only <eos> follows."""
        ids = self.text(answer) + [END_TURN]
        ids = ids + [EOS] * (-len(ids) % CANVAS)
        return [ids[i:i + CANVAS] for i in range(0, len(ids), CANVAS)]
