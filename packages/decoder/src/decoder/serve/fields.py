"""The fields of requests: each is honoured, or cannot change a text, or is refused by its name."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoder.checks import meant
from decoder.drafters import METHODS
from decoder.serve.body import field_of, inside, shortened
from decoder.serve.errors import ApiError
from decoder.serve.kinds import (
    CONTENT,
    FLAG,
    FUNCTION_CALL,
    INPUT,
    LIST,
    MESSAGES,
    NUMBER,
    OBJECT,
    PROMPTS,
    SCHEMA,
    TEXT,
    TOOL_CHOICE,
    TOOLS,
    Kind,
    biases,
    choice,
    choices,
    integer,
    texts,
    token_ids,
)

MOST_CHOICES = 128  # of one request
LARGEST_SEED = 2**63 - 1
_COMPLETION_TOKENS = 16  # max_tokens of a completion that does not give it, as in OpenAI's protocol
_MOST_OF_CHAT, _MOST_OF_COMPLETION = 20, 5  # most likely tokens with log-probabilities, as in OpenAI's protocol
_MOST_STOPS, _LONGEST_STOP = 16, 1000
_MOST_BAD_WORDS = 100
_LONGEST_CHOICE = 2**17
_MOST_IDS = 1000  # of tokens that end a text, or that never come
_LONGEST_NAME = 100  # characters of an unknown name that are compared with known ones
_LIKE = 0.55  # ratio of equal characters from which on a known name is what may be meant


@dataclass(frozen=True)
class Honoured:
    """A field that does what its name says."""

    kind: Kind
    default: Any = None


@dataclass(frozen=True)
class Ignored:
    """A field that cannot change a text, whatever its value."""


@dataclass(frozen=True)
class Refused:
    """A known field that is not supported.

    Args:
        harmless: values with which it asks for nothing.
        instead: what to do, where it asks for something.
    """

    harmless: tuple[Any, ...] = ()
    instead: str = "leave it out"


Fields = Mapping[str, Honoured | Ignored | Refused]

_SAMPLING: Fields = {
    "temperature": Honoured(NUMBER),
    "top_k": Honoured(integer(0, LARGEST_SEED)),
    "top_p": Honoured(NUMBER),
    "min_p": Honoured(NUMBER),
    "eta_cutoff": Honoured(NUMBER),
    "repetition_penalty": Honoured(NUMBER),
    "penalty_window": Honoured(integer(0, LARGEST_SEED)),
    "seed": Honoured(integer(0, LARGEST_SEED)),
    "suppress_tokens": Honoured(token_ids(_MOST_IDS)),
    "presence_penalty": Honoured(NUMBER),
    "frequency_penalty": Honoured(NUMBER),
    "logit_bias": Honoured(biases(_MOST_IDS)),
    "min_tokens": Honoured(integer(0, LARGEST_SEED)),
    "bad_words": Honoured(texts(_LONGEST_STOP, _MOST_BAD_WORDS)),
    "include_stop_str_in_output": Honoured(FLAG, False),
}
# At most one of them says what the answer must be; see `decoder.serve.shapes`.
_SHAPES: Fields = {
    "response_format": Honoured(OBJECT),
    "structured_outputs": Honoured(OBJECT),
    **dict.fromkeys(("guided_json", "json_schema"), Honoured(SCHEMA)),
    **dict.fromkeys(("guided_regex", "regex"), Honoured(TEXT)),
    "guided_choice": Honoured(texts(_LONGEST_CHOICE, _MOST_IDS)),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), Honoured(TEXT)),
}
_HONOURED: Fields = {
    **_SAMPLING,
    **_SHAPES,
    "model": Honoured(TEXT),
    "n": Honoured(integer(1, MOST_CHOICES), 1),
    "best_of": Honoured(integer(1, MOST_CHOICES)),
    "stop": Honoured(texts(_LONGEST_STOP, _MOST_STOPS), []),
    "stop_token_ids": Honoured(token_ids(_MOST_IDS), []),
    "ignore_eos": Honoured(FLAG, False),
    "skip_special_tokens": Honoured(FLAG, True),
    "method": Honoured(choice(METHODS)),
    "stream": Honoured(FLAG, False),
    "stream_options": Honoured(OBJECT, {}),
    "prompt_logprobs": Honoured(integer(0, _MOST_OF_CHAT)),
}
_IGNORED = (
    # OpenAI's: who asks, where it is booked, and what makes it faster.
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *(
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    ),
    # vLLM's, SGLang's and llama.cpp's: order and caches.
    *("request_id", "rid", "priority", "cache_salt", "cache_prompt", "id_slot", "guided_decoding_backend"),
    # Of methods that are off, because the field that switches each on is refused.
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold"),
)
_REFUSED: Fields = {
    # OpenAI's.
    "modalities": Refused((["text"],), "the model writes text alone"),
    "audio": Refused((), "leave it out: the model writes text alone"),
    "moderation": Refused((), "leave it out: there is no model here that moderates"),
    "web_search_options": Refused((), "leave it out, and send a tool that searches"),
    # Where a text ends, and how long it is at least.
    "min_new_tokens": Refused((0,), "send min_tokens"),
    "max_new_tokens": Refused((), "send max_tokens"),
    "n_predict": Refused((), "send max_tokens"),
    "max_length": Refused((), "send max_tokens"),
    "t_max_predict_ms": Refused((0,)),
    "stop_regex": Refused(([], "")),
    "no_stop_trim": Refused((False,), "send include_stop_str_in_output"),
    # How tokens are chosen.
    "do_sample": Refused((True,), "send temperature 0 for the most likely tokens"),
    "num_beams": Refused((1,)),
    "use_beam_search": Refused((False,)),
    "length_penalty": Refused((1,)),
    "typical_p": Refused((1,)),
    "epsilon_cutoff": Refused((0,), "leave it out, or send eta_cutoff or min_p"),
    "top_a": Refused((0,), "leave it out, or send min_p"),
    "tfs_z": Refused((1,), "leave it out, or send min_p"),
    "top_n_sigma": Refused((-1, 0)),
    "repeat_penalty": Refused((1,), "send repetition_penalty, and penalty_window for its length"),
    "repeat_last_n": Refused((), "send penalty_window"),
    "no_repeat_ngram_size": Refused((0,)),
    "dry_multiplier": Refused((0,)),
    "xtc_probability": Refused((0,)),
    "dynatemp_range": Refused((0,)),
    "mirostat": Refused((0,)),
    "samplers": Refused(),
    "min_keep": Refused((0,)),
    "bad_words_ids": Refused(([],), "send bad_words, or suppress_tokens for single tokens"),
    "allowed_token_ids": Refused(),
    "logits_processors": Refused(([],)),
    "custom_logit_processor": Refused(),
    "thinking_token_budget": Refused(),
    "lora": Refused(([],)),
    "lora_path": Refused(),
    "vllm_xargs": Refused(({},)),
    "guided_whitespace_pattern": Refused(),
    # How prompts become tokens, and tokens text.
    "truncate_prompt_tokens": Refused(),
    "n_keep": Refused((0,)),
    "spaces_between_special_tokens": Refused((True,)),
    "prompt_embeds": Refused(),
    "input_embeds": Refused(),
    "kv_transfer_params": Refused(),
    # What an answer would have.
    "n_probs": Refused((0,), "send logprobs"),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "return_tokens"), Refused((False,))),
    **dict.fromkeys(("return_hidden_states", "return_progress", "timings_per_token"), Refused((False,))),
    **dict.fromkeys(("response_fields", "post_sampling_probs"), Refused((False, []))),
}
_BOTH: Fields = {**_REFUSED, **dict.fromkeys(_IGNORED, Ignored()), **_HONOURED}
COMPLETION: Fields = {
    **_BOTH,
    "prompt": Honoured(PROMPTS),
    "max_tokens": Honoured(integer(0, LARGEST_SEED), _COMPLETION_TOKENS),
    "logprobs": Honoured(integer(0, _MOST_OF_COMPLETION)),
    "echo": Honoured(FLAG, False),
    "suffix": Refused(("",), "leave it out: models here write what follows, and not what lies between"),
    "tools": Refused(([],), "send it to /v1/chat/completions"),
    "tool_choice": Refused(("none", "auto"), "send it to /v1/chat/completions"),
    "functions": Refused(([],), "send tools to /v1/chat/completions"),
    "function_call": Refused(("none", "auto"), "send tool_choice to /v1/chat/completions"),
    "parallel_tool_calls": Ignored(),
    "reasoning_effort": Refused(("none",), "send it to /v1/chat/completions"),
    "verbosity": Refused(("medium",), "send it to /v1/chat/completions"),
    "add_special_tokens": Refused((True,), "send token ids"),
    "max_completion_tokens": Refused((), "send max_tokens"),
    "top_logprobs": Refused((), "send logprobs with the number"),
    "messages": Refused((), "send them to /v1/chat/completions"),
}
_OF_CHATS: Fields = {
    "tools": Honoured(TOOLS),
    "tool_choice": Honoured(TOOL_CHOICE),
    "parallel_tool_calls": Honoured(FLAG, True),
    "chat_template_kwargs": Honoured(OBJECT, {}),
    "include_reasoning": Honoured(FLAG, True),
    "chat_template": Refused(),
    "echo": Refused((False,)),
    "add_generation_prompt": Refused((True,)),
    "continue_final_message": Refused((False,)),
    "add_special_tokens": Refused((False,)),
    "documents": Refused(([],)),
    "stream_reasoning": Refused((True,)),
}
_EFFORT = Honoured(choice(("none", "minimal", "low", "medium", "high", "xhigh", "max")))
_VERBOSITY = Honoured(choice(("low", "medium", "high")))
CHAT: Fields = {
    **_BOTH,
    **_OF_CHATS,
    "messages": Honoured(MESSAGES),
    "max_tokens": Honoured(integer(1, LARGEST_SEED)),
    "max_completion_tokens": Honoured(integer(1, LARGEST_SEED)),
    "logprobs": Honoured(FLAG, False),
    "top_logprobs": Honoured(integer(0, _MOST_OF_CHAT), 0),
    # What tools were called before.
    "functions": Honoured(TOOLS),
    "function_call": Honoured(FUNCTION_CALL),
    "reasoning_effort": _EFFORT,
    "verbosity": _VERBOSITY,
    "separate_reasoning": Honoured(FLAG, True),
    "reasoning_format": Honoured(choice(("none", "auto", "deepseek"))),
    "prompt": Refused((), "send it to /v1/completions"),
}
LOGPROBS = "message.output_text.logprobs"
RESPONSE: Fields = {
    **_BOTH,
    **_OF_CHATS,
    "input": Honoured(INPUT),
    "instructions": Honoured(TEXT),
    "previous_response_id": Honoured(TEXT),
    "store": Honoured(FLAG, True),
    "metadata": Honoured(OBJECT, {}),
    "max_output_tokens": Honoured(integer(1, LARGEST_SEED)),
    "text": Honoured(OBJECT, {}),
    "reasoning": Honoured(OBJECT, {}),
    "include": Honoured(
        choices(
            # What belongs to tools of OpenAI's own, and reasoning in a form that is none here: it comes as text.
            *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
            *("message.input_image.image_url", "computer_call_output.output.image_url"),
            *("code_interpreter_call.outputs", "reasoning.encrypted_content", LOGPROBS),
        ),
        [],
    ),
    "top_logprobs": Honoured(integer(0, _MOST_OF_CHAT), 0),
    "truncation": Honoured(choice(("disabled", "auto")), "disabled"),
    **dict.fromkeys(("access_programs", "background_options", "image", "max_tool_calls"), Ignored()),
    "background": Refused((False,), "send stream as true"),
    "context_management": Refused(([],), "send truncation as auto"),
    "conversation": Refused((), "send previous_response_id, or all items as input"),
    "prompt": Refused((), "send the text as input"),
    **dict.fromkeys(("messages", "input_items"), Refused((), "send them as input")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refused((), "send max_output_tokens")),
    "response_format": Refused((), "send text with its format"),
    "logprobs": Refused((False,), f"send {LOGPROBS} in include"),
    "reasoning_effort": Refused((), "send reasoning with its effort"),
    "verbosity": Refused((), "send text with its verbosity"),
    **dict.fromkeys(("n", "best_of"), Refused((1,), "send a request for each")),
    "functions": Refused(([],), "send tools"),
    "function_call": Refused(("none", "auto"), "send tool_choice"),
    "prompt_logprobs": Refused((), "send it to /v1/chat/completions"),
}
TEXT_OF_RESPONSE: Fields = {"format": Honoured(OBJECT), "verbosity": _VERBOSITY}
REASONING: Fields = {
    "effort": _EFFORT,
    # How much of the reasoning would be told: it comes as it is.
    **dict.fromkeys(("summary", "generate_summary", "context"), Ignored()),
    "mode": Refused(("standard",)),
}
STREAM_OPTIONS: Fields = {
    "include_usage": Honoured(FLAG, False),
    "include_obfuscation": Ignored(),
    "continuous_usage_stats": Refused((False,)),
}
TOKENIZE: Fields = {
    "model": Ignored(),
    "prompt": Honoured(TEXT),
    "content": Honoured(TEXT),  # llama.cpp's name for it
    "messages": Honoured(MESSAGES),
    "tools": Honoured(TOOLS),
    "chat_template_kwargs": Honoured(OBJECT, {}),
    **dict.fromkeys(("add_special_tokens", "add_special"), Honoured(FLAG)),
    **dict.fromkeys(("return_token_strs", "with_pieces"), Honoured(FLAG, False)),
    "parse_special": Refused((True,)),
    "add_generation_prompt": Refused((True,)),
    "continue_final_message": Refused((False,)),
}
DETOKENIZE: Fields = {"model": Ignored(), "tokens": Honoured(token_ids(2**24), [])}
RESPONSE_FORMAT: Fields = {
    "type": Honoured(choice(("text", "json_object", "json_schema"))),
    "json_schema": Honoured(OBJECT),
    # llama.cpp's, of either type, and that of /v1/responses.
    "schema": Honoured(SCHEMA),
    "strict": Honoured(FLAG),
    "name": Ignored(),
    "description": Ignored(),
}
JSON_SCHEMA: Fields = {
    "schema": Honoured(SCHEMA),
    # Answers always hold to the schema, strictly or not; what it is called is for the one who asks.
    "strict": Honoured(FLAG),
    "name": Ignored(),
    "description": Ignored(),
}
STRUCTURED_OUTPUTS: Fields = {
    "json": Honoured(SCHEMA),
    "regex": Honoured(TEXT),
    "choice": Honoured(texts(_LONGEST_CHOICE, _MOST_IDS)),
    "grammar": Honoured(TEXT),
    "json_object": Honoured(FLAG),
    "disable_any_whitespace": Honoured(FLAG, False),
    "disable_fallback": Ignored(),
    "disable_additional_properties": Refused((False,), "send additionalProperties in the schema"),
    "whitespace_pattern": Refused(),
    "structural_tag": Refused(),
}
MESSAGE: Fields = {
    "role": Honoured(TEXT),
    "content": Honoured(CONTENT),
    "name": Honoured(TEXT),
    # What the answers of some servers have beside their text, and clients send back.
    "annotations": Ignored(),
    "refusal": Honoured(TEXT),
    "audio": Refused((), "leave it out: the model reads text alone"),
    "tool_calls": Honoured(LIST),
    "tool_call_id": Honoured(TEXT),
    "function_call": Honoured(OBJECT),
    "reasoning": Honoured(TEXT),
    "reasoning_content": Honoured(TEXT),
}
TOOL_CALL: Fields = {
    "id": Honoured(TEXT),
    "type": Honoured(choice(("function",))),
    "function": Honoured(OBJECT),
    "index": Ignored(),
}
CALLED: Fields = {"name": Honoured(TEXT), "arguments": Honoured(TEXT)}
TOOL: Fields = {"type": Honoured(choice(("function",))), "function": Honoured(OBJECT)}
FUNCTION: Fields = {
    "name": Honoured(TEXT),
    "description": Honoured(TEXT),
    "parameters": Honoured(OBJECT),
    # Arguments hold to their schema, strictly or not.
    "strict": Ignored(),
}
OLD_FUNCTION: Fields = {name: FUNCTION[name] for name in ("name", "description", "parameters")}
FLAT_TOOL: Fields = {
    **FUNCTION,
    "type": TOOL["type"],
    "defer_loading": Refused((False,)),
    **dict.fromkeys(("allowed_callers", "async", "output_schema"), Ignored()),
}
_CHOICE = Honoured(choice(("function", "allowed_tools")))
CHOICE_OF_TOOL: Fields = {"type": _CHOICE, "function": Honoured(OBJECT), "allowed_tools": Honoured(OBJECT)}
NAMED: Fields = {"name": Honoured(TEXT)}
ALLOWED_TOOLS: Fields = {"mode": Honoured(choice(("auto", "required")), "auto"), "tools": Honoured(TOOLS, [])}
FLAT_CHOICE: Fields = {"type": _CHOICE, "name": Honoured(TEXT), **ALLOWED_TOOLS}
_TEXT_ALONE = "; the model reads text alone"
_PART: Fields = {
    **dict.fromkeys(("text", "refusal"), Honoured(TEXT)),
    **dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), Ignored()),
}
PART: Fields = {"type": Honoured(choice(("text", "refusal"), _TEXT_ALONE)), **_PART}
PART_OF_ITEM: Fields = {
    "type": Honoured(
        choice(("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"), _TEXT_ALONE)
    ),
    **_PART,
    # Of an answer that is sent back.
    **dict.fromkeys(("annotations", "logprobs"), Ignored()),
}
_ITEM: Fields = {"type": Honoured(TEXT), **dict.fromkeys(("id", "status", "caller", "created_by"), Ignored())}
ITEMS: Mapping[str, Fields] = {
    "message": {
        **_ITEM,
        "role": Honoured(choice(("user", "assistant", "system", "developer"))),
        "content": Honoured(CONTENT),
        "phase": Ignored(),
    },
    "reasoning": {
        **_ITEM,
        **dict.fromkeys(("summary", "content"), Honoured(LIST, [])),
        "encrypted_content": Refused((), "send the reasoning as content"),
    },
    "function_call": {
        **_ITEM,
        **dict.fromkeys(("call_id", "name", "arguments"), Honoured(TEXT)),
        "namespace": Refused(),
        "async": Refused((False,)),
    },
    "function_call_output": {
        **_ITEM,
        "call_id": Honoured(TEXT),
        "output": Honoured(CONTENT),
        "name": Honoured(TEXT),
        "namespace": Refused(),
    },
    "item_reference": {"type": Honoured(TEXT), "id": Honoured(TEXT)},
}


def read(given: Mapping[str, Any], fields: Fields, place: str = "") -> dict[str, Any]:
    """The values of all honoured fields of an object, with the defaults of those that it does not have.

    Null stands for a field that is not there.

    Raises:
        ApiError: 400, with the place of a field that is unknown, not supported or of another kind.
    """
    values = {name: field.default for name, field in fields.items() if isinstance(field, Honoured)}
    for name, value in given.items():
        match fields.get(name):
            case None:
                refuse(inside(place, name), f"is no known field: {_meant(name, fields)}")
            case Refused(harmless, instead):
                if value is not None and not any(_same(value, one) for one in harmless):
                    refuse(inside(place, name), f"is not supported here: {instead}")
            case Honoured(kind):
                if value is not None:
                    require(kind, value, inside(place, name))
                    values[name] = value
    return values


def read_body(body: Any, fields: Fields) -> dict[str, Any]:
    """`read` of the value of a whole body."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return read(body, fields)


def require(kind: Kind, value: Any, place: str) -> None:
    """Raise a 400 with the place of a value that is not of a kind."""
    if not kind.fits(value):
        refuse(place, f"must be {kind.words}{meant(value, kind.schema.get('enum', ()))}")


def refuse(place: str, words: str) -> None:
    """Raise a 400 with a place in the body."""
    raise ApiError(400, f"{shortened(place)} {words}", field_of(place))


def _meant(name: str, fields: Fields) -> str:
    """What to do about an unknown name."""
    near = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), fields, 1, _LIKE)
    return f"leave it out, or is {near[0]} meant?" if near else "leave it out"


def _same(value: Any, harmless: Any) -> bool:
    # In Python false equals 0, which in JSON is another kind.
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless
