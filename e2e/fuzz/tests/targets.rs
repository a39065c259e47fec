//! Tests each target with a fixed number of inputs. The inputs are the same in every run.
use std::io;

use cleave_fuzz::engine::{RunLimit, fuzz, read_corpus};
use cleave_fuzz::{ReadResult, all_targets, guard, target_named};

const SEED: u64 = 1;

/// Runs a target on its samples, its corpus and its mutations.
fn run_target(name: &str) -> io::Result<()> {
    let target = target_named(name).ok_or_else(|| io::Error::other("unknown target"))?;
    for sample in (target.samples)() {
        assert_eq!(
            guard::run(target, &sample),
            ReadResult::Read,
            "{name} failed to read its sample {}",
            String::from_utf8_lossy(&sample)
        );
    }
    let progress = fuzz(target, SEED, RunLimit::Inputs(target.inputs.into()), |_| ())?;
    // Mutations are useful only if some are valid and some are not.
    assert!(
        (5..100).contains(&progress.read_percent()),
        "{name} reads {} % of {} inputs",
        progress.read_percent(),
        progress.inputs
    );
    Ok(())
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() -> io::Result<()> {
            run_target(stringify!($name))
        })*

        #[test]
        fn every_target_is_tested_and_every_corpus_directory_has_a_target() {
            let names: Vec<&str> = all_targets().iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
            let directories = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus")).expect("the corpus");
            for directory in directories {
                let name = directory.expect("a directory").file_name();
                let target = name.to_str().and_then(target_named).unwrap_or_else(|| panic!("no target is named {name:?}"));
                assert!(!read_corpus(target).expect("the target's corpus").is_empty());
            }
        }
    };
}

targets!(
    control_packet,
    log_line,
    desired,
    host_message,
    checkpoint,
    node_spec,
    mps_status,
    shutdown_note,
    pods,
    proc,
    device_plugin,
    pod_resources,
    kubelet_checkpoint,
    snapshot,
    claim,
    policy,
    cluster,
    review,
    placement,
    annotations,
    quantity,
    names,
);
