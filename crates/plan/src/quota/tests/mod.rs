//! Tests the rules of quotas on random worlds.
//!
//! | module | content |
//! |---|---|
//! | `worlds` | random pools, and random histories of them |
//! | `naive` | sums, classes and room, computed as plainly as possible |
//! | `naive_look` | a pass that tries all sets of victims |
//! | `steps` | the pool before and after each decision of a pass |
//! | `exchanges` | R1 to R4: what each decision keeps |
//! | `rest` | R5, R6: what holds when nothing changes any more |
//! | `inputs` | R7 to R11: what does not depend on what |
//! | `ageing` | a stream of small pods does not starve a large pod |
//! | `overriding` | pods of high priority that do not stop at the borders of quotas |
//! | `pieces` | pods of several GPUs, and pods that do not borrow |
//! | `gangs` | pods that start, wait and leave together |
//! | `models` | R12, R13: agreement with the naive model, and speed |
//!
//! `cargo test` runs the same [`WORLDS`] worlds for each property each time, so that it never fails
//! by chance. `make quotas` runs 100,000: `QUOTA_WORLDS` sets the number, and selects the worlds at
//! random.
mod ageing;
mod exchanges;
mod gangs;
mod inputs;
mod models;
mod naive;
mod naive_look;
mod overriding;
mod pieces;
mod rest;
mod steps;
mod worlds;

use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;

/// Number of worlds of each property if `QUOTA_WORLDS` is not set.
const WORLDS: u32 = 1000;

/// Returns how many worlds to try.
fn config() -> ProptestConfig {
    let chosen = std::env::var("QUOTA_WORLDS").ok().and_then(|worlds| worlds.parse().ok());
    match chosen {
        Some(cases) => ProptestConfig { cases, ..ProptestConfig::default() },
        None => ProptestConfig { cases: WORLDS, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() },
    }
}
