//! Replaces the time of day of programs that load this library through `LD_PRELOAD`. Tests can set
//! this time of day. The machine's clock does not change.
//!
//! `/dev/shm/sim-clock`, or the file in `SIM_CLOCK`, contains the offset of the time of day in
//! seconds, as text. Each query reads the file, so a test can set the clock of a running program.
//! If the file does not exist, the offset is 0. The library does not change clocks that cannot be
//! set, such as `CLOCK_MONOTONIC`. It works for dynamically linked programs that query the time
//! through the C library, as Rust's standard library does.

// This crate exports C functions, which have raw pointers and unmangled names.
#![allow(unsafe_code)]

use std::ffi::CStr;

use libc::{c_char, c_int, c_long, c_void, clockid_t, time_t, timespec, timeval};

/// The file with the offset, unless `SIM_CLOCK` names another file.
const DEFAULT_OFFSET_FILE: &CStr = c"/dev/shm/sim-clock";
const OFFSET_FILE_ENV: &CStr = c"SIM_CLOCK";

/// Reads the offset in seconds. This function may call only functions that are safe in signal
/// handlers and do not query the time.
fn read_offset() -> time_t {
    let mut text = [0_u8; 24];
    // SAFETY: both strings end with a zero byte, as does the result of `getenv`. No code here
    // changes the environment. `text` has as many bytes as `read` may write.
    let read = unsafe {
        let named = libc::getenv(OFFSET_FILE_ENV.as_ptr());
        let path: *const c_char = if named.is_null() { DEFAULT_OFFSET_FILE.as_ptr() } else { named };
        let file = libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return 0;
        }
        let read = libc::read(file, text.as_mut_ptr().cast::<c_void>(), text.len());
        libc::close(file);
        read
    };
    usize::try_from(read).ok().and_then(|read| text.get(..read)).map_or(0, parse_offset)
}

/// Parses an offset. Returns 0 for invalid text, such as a partially written file.
fn parse_offset(text: &[u8]) -> time_t {
    std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Queries the kernel's clock.
fn query_kernel_clock(clock: clockid_t, time: *mut timespec) -> c_int {
    // Use a raw system call, because this library replaces the C library's function. SAFETY: the
    // kernel checks the pointer and returns EFAULT if it cannot write there.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, c_long::from(clock), time) };
    c_int::try_from(result).unwrap_or(-1)
}

/// Returns the time of day plus the offset, in seconds and nanoseconds.
fn time_of_day() -> (time_t, c_long) {
    let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
    query_kernel_clock(libc::CLOCK_REALTIME, &raw mut time);
    (time.tv_sec.saturating_add(read_offset()), time.tv_nsec)
}

/// `clock_gettime(2)`, with the offset added to the time of day.
///
/// # Safety
/// `time` must point to a writable `timespec`, or to an address that the kernel cannot write. If
/// the kernel cannot write there, the function fails with EFAULT, as `clock_gettime(2)` describes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    let result = query_kernel_clock(clock, time);
    if result == 0 && matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE) {
        // SAFETY: `time` is valid, because the kernel has written to it.
        unsafe { (*time).tv_sec = (*time).tv_sec.saturating_add(read_offset()) };
    }
    result
}

/// `gettimeofday(2)`, with the offset added. Ignores the time zone, as the C library does.
///
/// # Safety
/// `time` must be null or point to a writable `timeval`, as `gettimeofday(2)` requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut timeval, _zone: *mut c_void) -> c_int {
    let (seconds, nanoseconds) = time_of_day();
    if !time.is_null() {
        // SAFETY: the caller guarantees that `time` is valid if it is not null.
        unsafe { *time = timeval { tv_sec: seconds, tv_usec: nanoseconds / 1000 } };
    }
    0
}

/// `time(2)`, with the offset added.
///
/// # Safety
/// `time` must be null or point to a writable `time_t`, as `time(2)` requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut time_t) -> time_t {
    let (seconds, _) = time_of_day();
    if !time.is_null() {
        // SAFETY: the caller guarantees that `time` is valid if it is not null.
        unsafe { *time = seconds };
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_offset_counts_as_zero() {
        for (text, seconds) in [("3600\n", 3600), ("-3600", -3600), ("", 0), ("-", 0), ("1h", 0), ("\u{ff}", 0)] {
            assert_eq!(parse_offset(text.as_bytes()), seconds, "{text:?}");
        }
    }
}
