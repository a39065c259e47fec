//! Tests the property R12: passes agree with the naive model.
use proptest::prelude::*;

use super::super::look;
use super::config;
use super::naive_look;
use super::worlds::{Run, describe, histories};

proptest! {
    #![proptest_config(config())]

    /// Each pass of a history makes the same decisions as the naive model, which tries all sets of
    /// victims.
    #[test]
    fn r12_the_naive_model_makes_the_same_decisions(history in histories()) {
        let mut run = Run::new(history.start.0.clone());
        run.world.pods.truncate(8);
        for event in &history.events {
            let outcome = look(&run.world, run.now);
            prop_assert_eq!(&outcome, &naive_look::naive_look(&run.world, run.now), "{}", describe(&run.world));
            run.apply(&outcome);
            run.happen(event);
        }
    }
}
