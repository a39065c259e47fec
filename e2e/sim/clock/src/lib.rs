//! A time of day that tests can set, for the programs that load this by `LD_PRELOAD` and no other:
//! the machine's clock is not touched.
//!
//! `/dev/shm/sim-clock` (or the file that `SIM_CLOCK` names) has how many seconds the time of day
//! is off, as text, and is read at each question, so that a test sets the clock of a program that
//! runs. Without a file the clock is right. Clocks that nobody sets, such as `CLOCK_MONOTONIC`, are
//! answered as they are. It takes dynamically linked programs that ask through the C library, as
//! Rust's standard library does.

// This crate is a C ABI: raw pointers come in, and symbols go out unmangled.
#![allow(unsafe_code)]

use std::ffi::CStr;

use libc::{c_char, c_int, c_long, c_void, clockid_t, time_t, timespec, timeval};

/// Where the offset is, unless the variable names another file.
const FILE: &CStr = c"/dev/shm/sim-clock";
const VARIABLE: &CStr = c"SIM_CLOCK";

/// How many seconds the time of day is off. Asks by calls that may be made in a signal handler, and
/// never for the time.
fn offset() -> time_t {
    let mut text = [0_u8; 24];
    // SAFETY: both strings end with a zero byte; what `getenv` gives does too, and nobody here
    // changes the environment; `text` has as many bytes as are asked for.
    let read = unsafe {
        let named = libc::getenv(VARIABLE.as_ptr());
        let path: *const c_char = if named.is_null() { FILE.as_ptr() } else { named };
        let file = libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return 0;
        }
        let read = libc::read(file, text.as_mut_ptr().cast::<c_void>(), text.len());
        libc::close(file);
        read
    };
    usize::try_from(read).ok().and_then(|read| text.get(..read)).map_or(0, parse)
}

/// What is no number, or cut short by a test that writes just now, sets nothing.
fn parse(text: &[u8]) -> time_t {
    std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// What the kernel says.
fn real(clock: clockid_t, time: *mut timespec) -> c_int {
    // Not by the C library, whose function of that name this is.
    // SAFETY: the kernel checks the pointer, and says EFAULT where it cannot be written.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, c_long::from(clock), time) };
    c_int::try_from(result).unwrap_or(-1)
}

/// The seconds and nanoseconds of the time of day.
fn time_of_day() -> (time_t, c_long) {
    let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
    real(libc::CLOCK_REALTIME, &raw mut time);
    (time.tv_sec.saturating_add(offset()), time.tv_nsec)
}

/// As `clock_gettime(2)`, with the time of day off.
///
/// # Safety
/// As that: `time` points to a `timespec`, or to nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    let result = real(clock, time);
    if result == 0 && matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE) {
        // SAFETY: the kernel has written it.
        unsafe { (*time).tv_sec = (*time).tv_sec.saturating_add(offset()) };
    }
    result
}

/// As `gettimeofday(2)`, with the time of day off. Of the time zone nothing is said, as by the C
/// library.
///
/// # Safety
/// As that: `time` points to a `timeval`, or is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut timeval, _zone: *mut c_void) -> c_int {
    let (seconds, nanoseconds) = time_of_day();
    if !time.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *time = timeval { tv_sec: seconds, tv_usec: nanoseconds / 1000 } };
    }
    0
}

/// As `time(2)`, with the time of day off.
///
/// # Safety
/// As that: `time` points to a `time_t`, or is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut time_t) -> time_t {
    let (seconds, _) = time_of_day();
    if !time.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *time = seconds };
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_sets_nothing() {
        for (text, seconds) in [("3600\n", 3600), ("-3600", -3600), ("", 0), ("-", 0), ("1h", 0), ("\u{ff}", 0)] {
            assert_eq!(parse(text.as_bytes()), seconds, "{text:?}");
        }
    }
}
