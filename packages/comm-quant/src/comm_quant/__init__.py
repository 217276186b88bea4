"""Fewer bytes on the wire: block codecs and quantized collectives."""

from comm_quant._codec import BlockQuant, Codec, Float8Quant
from comm_quant._collectives import all_reduce, all_to_all
from comm_quant._counter import Payload
from comm_quant._feedback import ErrorFeedback
from comm_quant._native import has_kernels
from comm_quant._one_bit_adam import OneBitAdam
from comm_quant._plain_wire import PlainWire
from comm_quant._quantize import (
    dequantize,
    dequantize_sum,
    dequantize_sum_requantize,
    quantize,
)
from comm_quant._transfer import Transfer
from comm_quant._wire import QuantizedWire

__version__ = "0.1.0"

__all__ = [
    "BlockQuant",
    "Codec",
    "ErrorFeedback",
    "Float8Quant",
    "OneBitAdam",
    "Payload",
    "PlainWire",
    "QuantizedWire",
    "Transfer",
    "all_reduce",
    "all_to_all",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_requantize",
    "has_kernels",
    "quantize",
]
