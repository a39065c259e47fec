//! The library in a program that asks as Rust's standard library does, and whose clock is set while
//! it runs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what it did not find")]
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

const CHILD: &str = "SIM_CLOCK_CHILD";

/// The time of day in seconds as the kernel says it: the library that is tested has no part in it.
fn real() -> i64 {
    clock_gettime(ClockId::Realtime).tv_sec
}

/// Run by the test below, in a process of its own: for each line of its input it says how far the
/// time of day is off, and whether time goes on.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let mut last = Instant::now();
    for line in std::io::stdin().lines() {
        line.unwrap();
        let before = real();
        let told = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
        let after = real();
        let now = Instant::now();
        let steady = now >= last && (now - last).as_secs() < 1800;
        last = now;
        println!("told {} {} {steady}", told - after, told - before);
    }
}

#[test]
fn the_time_of_day_is_off_as_the_file_says_and_other_clocks_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("clock");
    let library = std::env::current_exe().unwrap().with_file_name("libsim_clock.so");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_PRELOAD", library)
        .env("SIM_CLOCK", &file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut asked = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for (text, off) in [(None, 0), (Some("3600\n"), 3600), (Some("-3600\n"), -3600), (Some("soon"), 0), (Some("7"), 7)]
    {
        if let Some(text) = text {
            std::fs::write(&file, text).unwrap();
        }
        writeln!(asked).unwrap();
        let told = lines.by_ref().map(Result::unwrap).find(|line| line.contains("told ")).unwrap();
        let words: Vec<&str> = told.split_whitespace().rev().take(3).collect();
        let [steady, most, least] = words[..] else { panic!("{told}") };
        let (least, most): (i64, i64) = (least.parse().unwrap(), most.parse().unwrap());
        assert!(least <= off && off <= most, "{text:?}: it is off by {least} to {most}");
        assert_eq!(steady, "true", "{text:?}");
    }
    drop(asked);
    assert!(child.wait().unwrap().success());
}
