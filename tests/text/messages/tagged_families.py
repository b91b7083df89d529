"""Families of models that write arguments between tags, as `families.Family` takes them."""

# ruff: noqa: RUF001 (DeepSeek's marks are made of such characters.)

from __future__ import annotations

from typing import Any

_GLM: dict[str, Any] = {
    "format": "glm",
    "model_type": "glm4_moe",
    "chat_template": "<|assistant|> <tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value }}</arg_value>\n</tool_call><think></think>",
    "turn": "<|assistant|>",
    "call": "<tool_call>{name}\n{arguments}</tool_call>",
    "between": "\n",
    "reasoning": ("<think>", "</think>\n"),
    "argument": "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
}
_DSML: dict[str, Any] = {
    "format": "deepseek-v4",
    "model_type": "deepseek_v4",
    "chat_template": "<｜Assistant｜><think></think> ｜DSML｜ tool_calls>",
    "turn": "<｜Assistant｜>",
    "open": "\n\n<｜DSML｜tool_calls>\n",
    "call": '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n',
    "close": "</｜DSML｜tool_calls>",
    "reasoning": ("<think>", "</think>"),
    "argument": '<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n',
}

TAGGED: dict[str, dict[str, Any]] = {
    "GLM-4.5": _GLM,
    "GLM-4.7": _GLM
    | {
        "format": "glm-4.7",
        "chat_template": "<|assistant|> <tool_call>{{ name }}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ value }}</arg_value></tool_call><think></think>",
        "call": "<tool_call>{name}{arguments}</tool_call>",
        "between": "",
        "reasoning": ("<think>", "</think>"),
        "argument": "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    },
    "Kimi K2": {
        "format": "kimi-k2",
        "model_type": "kimi_k2",
        "chat_template": "<|im_assistant|>assistant<|im_middle|><think></think>"
        "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        "turn": "<|im_assistant|>assistant<|im_middle|>",
        "open": "<|tool_calls_section_begin|>",
        "call": "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        "close": "<|tool_calls_section_end|>",
        "reasoning": ("<think>", "</think>"),
        "is_json": True,
    },
    "Kimi K3": {
        "format": "kimi-k3",
        "model_type": "kimi_k3",
        "chat_template": "'<|open|>' + tag + '<|sep|>' '<|close|>' think",
        "turn": '<|open|>message role="assistant"<|sep|>',
        "open": "<|open|>tools<|sep|>",
        "call": '<|open|>call tool="{name}" index="1"<|sep|>{arguments}<|close|>call<|sep|>',
        "close": "<|close|>tools<|sep|><|close|>message<|sep|>",
        "reasoning": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        "argument": '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument'
        "<|sep|>",
        "answer": "<|open|>response<|sep|>",
        "answered": "<|close|>response<|sep|>",
    },
    "MiniMax-M2": {
        "format": "minimax-m2",
        "model_type": "minimax_m2",
        "chat_template": "]~b]ai <minimax:tool_call><invoke name={{ name }}> <think></think>",
        "turn": "]~b]ai\n",
        "open": "\n<minimax:tool_call>\n",
        "call": '<invoke name="{name}">\n{arguments}</invoke>\n',
        "close": "</minimax:tool_call>",
        "reasoning": ("<think>\n", "\n</think>\n\n"),
        "argument": '<parameter name="{key}">{value}</parameter>\n',
    },
    "DeepSeek-V3.2": _DSML
    | {
        "format": "deepseek-v3.2",
        "model_type": "deepseek_v32",
        "chat_template": "<｜Assistant｜><think></think> ｜DSML｜ function_calls>",
        "open": "\n\n<｜DSML｜function_calls>\n",
        "close": "</｜DSML｜function_calls>",
    },
    "DeepSeek-V4": _DSML,
    "Seed-OSS": {
        "format": "seed-oss",
        "model_type": "seed_oss",
        "chat_template": "<seed:bos>assistant <seed:tool_call> <seed:think>",
        "turn": "<seed:bos>assistant\n",
        "call": "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        "between": "\n",
        "reasoning": ("<seed:think>", "</seed:think>\n"),
        "argument": "<parameter={key}>{value}</parameter>\n",
    },
    "Step 3": {
        "format": "step3",
        "model_type": "step3_vl",
        "chat_template": "<｜tool_calls_begin｜> <steptml:invoke name={{ name }}> <think></think>",
        "turn": "<|BOT|>assistant\n",
        "open": "<｜tool_calls_begin｜>",
        "call": '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">'
        "{arguments}</steptml:invoke><｜tool_call_end｜>",
        "close": "<｜tool_calls_end｜>",
        "reasoning": ("<think>\n", "\n</think>\n\n"),
        "argument": '<steptml:parameter name="{key}">{value}</steptml:parameter>',
    },
    "Hy3": {
        "format": "hunyuan-3",
        "model_type": "hunyuan_v3",
        "chat_template": "<｜hy_Assistant:opensource｜><tool_sep><arg_key> <think>",
        "turn": "<｜hy_Assistant:opensource｜>",
        "open": "<tool_calls:opensource>\n",
        "call": "<tool_call:opensource>{name}<tool_sep:opensource>\n{arguments}"
        "</tool_call:opensource>\n",
        "close": "</tool_calls:opensource>",
        "reasoning": ("<think:opensource>", "</think:opensource>"),
        "argument": "<arg_key:opensource>{key}</arg_key:opensource>\n"
        "<arg_value:opensource>{value}</arg_value:opensource>\n",
    },
    "Solar Open": {
        "format": "solar",
        "model_type": "solar_open",
        "chat_template": "<|begin|>assistant<|think|><|tool_call:begin|><|tool_call:args|>",
        "turn": "<|begin|>assistant",
        "open": "<|tool_calls|>",
        "call": "<|tool_call:begin|>aB3<|tool_call:name|>{name}<|tool_call:args|>{arguments}"
        "<|tool_call:end|>",
        "close": "<|calls|>",
        "reasoning": ("<|think|>", "<|end|><|begin|>assistant"),
        "answer": "<|content|>",
        "answered": "<|end|><|begin|>assistant",
        "is_json": True,
    },
    "MiniCPM5": {
        "format": "minicpm",
        "model_type": "minicpm5",
        "chat_template": "<|im_start|> <function name={{ name }}><param name={{ key }}></think>",
        "turn": "<|im_start|>assistant\n",
        "call": '<function name="{name}">{arguments}</function>',
        "between": "\n",
        "reasoning": ("<think>\n", "\n</think>\n\n"),
        "argument": '<param name="{key}">{value}</param>',
    },
    "MiniCPM5 with CDATA": {
        "format": "minicpm",
        "model_type": "minicpm5",
        "chat_template": "<|im_start|> <function name={{ name }}><param name={{ key }}></think>",
        "turn": "<|im_start|>assistant\n",
        "call": '<function name="{name}">{arguments}</function>',
        "between": "\n",
        "reasoning": ("<think>\n", "\n</think>\n\n"),
        "argument": '<param name="{key}"><![CDATA[{value}]]></param>',
    },
    "Muse": {
        "format": "muse",
        "model_type": "muse_glimmer",
        "chat_template": "<|start|> <atem:invoke <|eom|> to=self",
        "turn": "<|start|>assistant",
        "call": ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        "{arguments}</atem:invoke>\n</atem:function_calls>",
        "between": "<|eom|><|start|>assistant",
        "close": "<|eot|>",
        "reasoning": (" to=self<|message|>", "<|eom|><|start|>assistant"),
        "argument": '<atem:parameter name="{key}">{value}</atem:parameter>\n',
        "answer": " to=user<|message|>",
        "answered": "<|eom|><|start|>assistant",
    },
}
