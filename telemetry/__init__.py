"""Traces, metrics and logs."""

from ..config.clock import now_ns as now_ns
from . import instruments as instruments
from . import names as names
from .context import TraceContext as TraceContext
from .context import is_sampled as is_sampled
from .gen_ai import PROVIDER as PROVIDER
from .gen_ai import Operation as Operation
from .gen_ai import operation_of as operation_of
from .gen_ai import usage_attributes as usage_attributes
from .log_output import LogOutput as LogOutput
from .logs import setup_logging as setup_logging
from .metrics import Labels as Labels
from .metrics import Metrics as Metrics
from .metrics import priority_label as priority_label
from .metrics import setup_metrics as setup_metrics
from .spans import Attributes as Attributes
from .tracing import Tracing as Tracing
from .tracing import endpoint_of as endpoint_of
from .tracing import setup_tracing as setup_tracing
