"""The names that programs import from `orbax.checkpoint.arrays`."""

from jaxckpt.orbax.utils import to_shape_dtype_struct as to_shape_dtype_struct

Shape = tuple[int, ...]
Index = tuple[slice, ...]
