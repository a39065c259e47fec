//! The pointers that C passes, as types that check for null and are read and written in one place.

use std::ffi::{CStr, c_char, c_uint};

use crate::library::{Code, Result};

/// Where a call writes a value, or several: null, or what NVML's documentation asks the caller to
/// provide.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn checked(self) -> Result<*mut T> {
        if self.0.is_null() { Err(Code::INVALID_ARGUMENT) } else { Ok(self.0) }
    }

    /// Writes the value.
    pub(crate) fn put(self, value: T) -> Result<()> {
        self.put_at(0, value)
    }

    /// Writes an element of an array.
    pub(crate) fn put_at(self, index: usize, value: T) -> Result<()> {
        let to = self.checked()?;
        // SAFETY: not null, and NVML's contract: the caller's buffer is valid for writes of as many
        // values as the call is documented to return, or as the caller's own count says, which is
        // checked before. C aligns it; programs that pack their structures would not, so the write
        // does not rely on it.
        unsafe { to.add(index).write_unaligned(value) };
        Ok(())
    }

    /// Reads what the caller put there: a count, or the version of a structure.
    pub(crate) fn get(self) -> Result<T> {
        let from = self.checked()?;
        // SAFETY: not null, and NVML's contract: the caller's variable is valid and holds what it
        // passes in. `T` is an integer or a C structure of integers, for which any bits will do.
        Ok(unsafe { from.read_unaligned() })
    }

    /// Reads an element of an array that the caller filled.
    pub(crate) fn get_at(self, index: usize) -> Result<T> {
        let from = self.checked()?;
        // SAFETY: as for `get`, and the caller's own count, which is checked before, says that
        // there are so many.
        Ok(unsafe { from.add(index).read_unaligned() })
    }

    /// The same address, as another version of a structure.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes a text and its end into a buffer of so many bytes.
    pub(crate) fn text(self, length: c_uint, text: &str) -> Result<()> {
        self.checked()?;
        if text.len() >= length as usize {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        text.bytes().chain([0]).enumerate().try_for_each(|(at, byte)| self.put_at(at, byte.cast_signed()))
    }
}

/// A value that the caller passes by address.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(self) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null, and NVML's contract: it points to a value of this type, a C structure
        // of integers.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// A text that the caller passes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Result<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null, and NVML's contract: a text that ends with a zero byte and stays as it
        // is during the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Code::INVALID_ARGUMENT)
    }
}

/// A text in a structure's array of characters, cut where it does not fit.
pub(crate) fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, byte) in array.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = byte.cast_signed();
    }
    array
}
