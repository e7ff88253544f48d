"""Types of columns that may be a prompt."""

import pyarrow as pa
import pyarrow.types as pt


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column holds texts."""
    if pt.is_dictionary(kind):
        kind = kind.value_type
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def is_ids(kind: pa.DataType) -> bool:
    """Tell whether a column holds lists of integers."""
    return is_list(kind) and pt.is_integer(kind.value_type)


def is_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes."""
    if pt.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pt.is_binary(kind)
        or pt.is_large_binary(kind)
        or pt.is_binary_view(kind)
        or pt.is_fixed_size_binary(kind)
    )


def holds_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column holds bytes, or lists or structs with them."""
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return is_bytes(kind) or any(map(holds_bytes, inner))
