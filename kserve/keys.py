"""By which names client and server tell each other what the messages have no field for."""

from __future__ import annotations

CODE_KEY = "nano-inference-code"
"""An error's stable code: in the trailing metadata of a call, or the parameters of a stream's
answer."""

RETRY_KEY = "retry-after"
"""In the trailing metadata: after how many seconds it is worth trying again."""

STATUS_KEY = "grpc-status"
"""In the parameters of a stream's answer: the number of the status that a call of its own would
have had."""

FINAL_PARAM = "triton_final_response"
"""Of a stream's answer: whether it is its request's last."""

WANTS_FINAL_PARAM = "triton_enable_empty_final_response"
"""Of a request: that an answer without outputs is to say which was the last, where there may be
several."""
