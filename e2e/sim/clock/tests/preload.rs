//! Tests the library in a program that queries the time through Rust's standard library. The test
//! sets the program's clock while the program runs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

const CHILD_PROCESS_ENV: &str = "SIM_CLOCK_CHILD";

/// Returns the kernel's time of day in seconds, without the library under test.
fn real_seconds() -> i64 {
    clock_gettime(ClockId::Realtime).tv_sec
}

/// The program that the next test runs. For each line of input, the program prints the offset of
/// its time of day, and whether its monotonic clock is steady.
#[test]
fn print_clock_offsets() {
    if std::env::var_os(CHILD_PROCESS_ENV).is_none() {
        return;
    }
    let mut last = Instant::now();
    for line in std::io::stdin().lines() {
        line.unwrap();
        let before = real_seconds();
        let reported = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
        let after = real_seconds();
        let now = Instant::now();
        let steady = now >= last && (now - last).as_secs() < 1800;
        last = now;
        println!("reported {} {} {steady}", reported - after, reported - before);
    }
}

#[test]
fn the_offset_applies_to_the_time_of_day_only() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("clock");
    let library = std::env::current_exe().unwrap().with_file_name("libsim_clock.so");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "print_clock_offsets", "--nocapture"])
        .env(CHILD_PROCESS_ENV, "1")
        .env("LD_PRELOAD", library)
        .env("SIM_CLOCK", &file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for (text, off) in [(None, 0), (Some("3600\n"), 3600), (Some("-3600\n"), -3600), (Some("soon"), 0), (Some("7"), 7)]
    {
        if let Some(text) = text {
            std::fs::write(&file, text).unwrap();
        }
        writeln!(input).unwrap();
        let reported = lines.by_ref().map(Result::unwrap).find(|line| line.contains("reported ")).unwrap();
        let words: Vec<&str> = reported.split_whitespace().rev().take(3).collect();
        let [steady, most, least] = words[..] else { panic!("{reported}") };
        let (least, most): (i64, i64) = (least.parse().unwrap(), most.parse().unwrap());
        assert!(least <= off && off <= most, "{text:?}: the offset is {least} to {most}");
        assert_eq!(steady, "true", "{text:?}");
    }
    drop(input);
    assert!(child.wait().unwrap().success());
}
