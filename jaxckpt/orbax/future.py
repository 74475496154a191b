"""The type of what a handler's `async_save` returns."""

from jaxckpt.orbax._handling import Future as Future
