//! Tests the rules of quotas on random worlds.
//!
//! | module | content |
//! |---|---|
//! | `worlds` | random pools, and random histories of them |
//! | `naive` | sums, classes and free capacity, computed in the simplest way |
//! | `naive_look` | a pass that tries all sets of victims |
//! | `steps` | the pool before and after each decision of a pass |
//! | `exchanges` | R1 to R4: rules that each decision follows |
//! | `rest` | R5, R6: properties of a pool at rest |
//! | `inputs` | R7 to R11: inputs on which decisions do not depend |
//! | `ageing` | a stream of small pods does not starve a large pod |
//! | `overriding` | pods of high priority that override quotas |
//! | `pieces` | pods that use several GPUs, and pods that must not borrow |
//! | `gangs` | pods that are released, counted and evicted together |
//! | `models` | R12: agreement with the naive model |
//!
//! `cargo test` runs the same [`WORLDS`] worlds for each property each time, so that it never fails
//! by chance. `make quotas` runs 100,000 worlds. If `QUOTA_WORLDS` is set, it is the number of
//! worlds, and the worlds are random.
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

/// Number of worlds for each property if `QUOTA_WORLDS` is not set.
const WORLDS: u32 = 1000;

/// Returns the configuration of all properties, with the number of worlds to try.
fn config() -> ProptestConfig {
    let chosen = std::env::var("QUOTA_WORLDS").ok().and_then(|worlds| worlds.parse().ok());
    match chosen {
        Some(cases) => ProptestConfig { cases, ..ProptestConfig::default() },
        None => ProptestConfig { cases: WORLDS, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() },
    }
}
