"""Types of columns that may be a prompt."""

import pyarrow as pa
import pyarrow.types as pt


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column holds texts."""
    return _plain(kind) in {pa.string(), pa.large_string(), pa.string_view()}


def is_list(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def is_ids(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists of integers."""
    return is_list(kind) and pt.is_integer(kind.value_type)


def is_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes."""
    plain = _plain(kind)
    return plain in {pa.binary(), pa.large_binary(), pa.binary_view()} or pt.is_fixed_size_binary(plain)


def holds_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes, or lists or structs with them."""
    return is_bytes(kind) or any(holds_bytes(kind.field(at).type) for at in range(kind.num_fields))


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pt.is_dictionary(kind) else kind
