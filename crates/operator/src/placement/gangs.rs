//! Reserves units for gangs: one reconcile releases either all waiting pods of a gang, or none.
use cleave_plan::ledger::{Fits, Ledger, Moment, Nomination};

use super::search::{Candidate, PlacementSearch};

/// Returns the pods of a gang in the order in which they are placed: the largest first. The first
/// pod represents the gang.
pub(super) fn in_placement_order<'a>(candidates: &'a [Candidate<'a>], positions: &[usize]) -> Vec<&'a Candidate<'a>> {
    let mut gang: Vec<&Candidate<'_>> = positions.iter().filter_map(|&at| candidates.get(at)).collect();
    let size = |one: &Candidate<'_>| one.device_requests.iter().map(|request| u64::from(request.units.get())).sum();
    gang.sort_by_cached_key(|one| (std::cmp::Reverse::<u64>(size(one)), one.name.clone()));
    gang
}

/// Reserves units for all pods of a gang. Reserves nothing if one of the pods does not fit.
pub(super) fn reserve_all<'a>(
    ledger: &mut Ledger,
    search: &mut PlacementSearch<'a>,
    gang: &[&'a Candidate<'a>],
    expires: Moment,
) -> Option<Vec<Fits>> {
    let before = search.checkpoint();
    let nominations: Vec<(&str, Nomination)> =
        gang.iter().filter_map(|one| Some((one.name.as_str(), ledger.nominations().get(&one.name)?.clone()))).collect();
    let mut reserved = Vec::new();
    for &one in gang {
        let Ok(fits) = search.find(ledger, one) else { break };
        if ledger.reserve(&one.name, &fits, expires).is_err() {
            break;
        }
        search.reserve(ledger, one, &fits);
        reserved.push(fits);
    }
    if reserved.len() == gang.len() {
        return Some(reserved);
    }
    gang.iter().take(reserved.len()).for_each(|one| drop(ledger.remove_claim(&one.name)));
    for (pod, nomination) in nominations {
        // Ignore errors: the ledger refuses only nominations for pods with a claim.
        let _ = ledger.nominate(pod, nomination);
    }
    search.restore(ledger, before);
    None
}
