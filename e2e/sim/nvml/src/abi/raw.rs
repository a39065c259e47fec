//! Wraps pointers from C. The wrappers check for null, and only this file dereferences pointers.

use std::ffi::{CStr, c_char, c_uint};

use crate::library::{Code, Result};

/// A pointer to which a call writes one or more values. The pointer is either null, or valid as
/// NVML's documentation requires.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn non_null(self) -> Result<*mut T> {
        if self.0.is_null() { Err(Code::INVALID_ARGUMENT) } else { Ok(self.0) }
    }

    /// Writes the value.
    pub(crate) fn put(self, value: T) -> Result<()> {
        self.put_at(0, value)
    }

    /// Writes an element of an array.
    pub(crate) fn put_at(self, index: usize, value: T) -> Result<()> {
        let to = self.non_null()?;
        // SAFETY: the pointer is not null. NVML requires that the buffer is valid for writes of
        // the documented number of values, or of the caller's count, which was checked. Programs
        // with packed structures may pass an unaligned buffer, so the write does not assume
        // alignment.
        unsafe { to.add(index).write_unaligned(value) };
        Ok(())
    }

    /// Reads the value that the caller has written: a count, or the version of a structure.
    pub(crate) fn get(self) -> Result<T> {
        let from = self.non_null()?;
        // SAFETY: the pointer is not null. NVML requires that the variable is valid and
        // initialized. `T` is an integer or a C structure of integers, so all bit patterns are
        // valid.
        Ok(unsafe { from.read_unaligned() })
    }

    /// Reads an element of the caller's array.
    pub(crate) fn get_at(self, index: usize) -> Result<T> {
        let from = self.non_null()?;
        // SAFETY: as in `get`. The caller's count, which was checked, includes the element.
        Ok(unsafe { from.add(index).read_unaligned() })
    }

    /// Returns a pointer to another version of the structure at the same address.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes a NUL-terminated text into a buffer of `length` bytes.
    pub(crate) fn text(self, length: c_uint, text: &str) -> Result<()> {
        self.non_null()?;
        if text.len() >= length as usize {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        text.bytes().chain([0]).enumerate().try_for_each(|(at, byte)| self.put_at(at, byte.cast_signed()))
    }
}

/// A pointer to a value that the caller passes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: the pointer is not null. NVML requires that it points to a value of this type,
        // which is a C structure of integers.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// A pointer to a NUL-terminated text that the caller passes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Result<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: the pointer is not null. NVML requires that the text ends with a zero byte and
        // does not change during the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Code::INVALID_ARGUMENT)
    }
}

/// Converts a text to a character array of a C structure. Truncates a text that is too long.
pub(crate) fn to_c_chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, byte) in array.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = byte.cast_signed();
    }
    array
}
