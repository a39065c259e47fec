//! Reserves units for gangs: one reconcile releases either all waiting pods of a gang, or none.
use cleave_plan::ledger::{Fits, Ledger, Moment, Nomination};

use super::search::{Candidate, PlacementSearch};
use super::verdict::Verdict;

/// A pod of a gang that is not placeable beside the other pods, and why.
pub(super) type BlockedPod<'a> = (&'a Candidate<'a>, Verdict);

/// Returns the pods of a gang in the order in which they are placed: the largest first. The first
/// pod represents the gang.
pub(super) fn in_placement_order<'a>(candidates: &'a [Candidate<'a>], positions: &[usize]) -> Vec<&'a Candidate<'a>> {
    let mut gang: Vec<&Candidate<'_>> = positions.iter().filter_map(|&at| candidates.get(at)).collect();
    let size = |one: &Candidate<'_>| one.device_requests.iter().map(|request| u64::from(request.units.get())).sum();
    gang.sort_by_cached_key(|one| (std::cmp::Reverse::<u64>(size(one)), one.name.clone()));
    gang
}

/// Reserves units for all pods of a gang.
///
/// # Errors
/// Returns a pod that is not placeable beside the others. Then nothing is reserved.
pub(super) fn reserve_all<'a>(
    ledger: &mut Ledger,
    search: &mut PlacementSearch<'a>,
    gang: &[&'a Candidate<'a>],
    expires: Moment,
) -> Result<Vec<Fits>, BlockedPod<'a>> {
    let Some(&head) = gang.first() else { return Ok(Vec::new()) };
    // Here, most gangs that do not fit have no reservation to undo.
    let mut first = Some(search.find(ledger, head).map_err(|verdict| (head, verdict))?);
    let key = search.gang_key(ledger, gang);
    if let Some((at, verdict)) = key.as_ref().and_then(|key| search.gang_without_place(key)) {
        return Err((gang.get(at).copied().unwrap_or(head), verdict));
    }
    let nominations: Vec<(&str, Nomination)> =
        gang.iter().filter_map(|one| Some((one.name.as_str(), ledger.nominations().get(&one.name)?.clone()))).collect();
    search.begin_gang(gang);
    let mut reserved = Vec::new();
    let mut blocked = None;
    for (at, &one) in gang.iter().enumerate() {
        let found = first.take().map_or_else(|| search.find(ledger, one), Ok);
        let found = found.and_then(|fits| match ledger.reserve(&one.name, &fits, expires) {
            Ok(()) => Ok(fits),
            Err(_) => Err(Verdict::Waits(String::new())),
        });
        match found {
            Ok(fits) => {
                search.reserve(ledger, one, &fits);
                reserved.push(fits);
            }
            Err(verdict) => {
                blocked = Some((at, verdict));
                break;
            }
        }
    }
    let Some((at, verdict)) = blocked else {
        search.keep_gang();
        return Ok(reserved);
    };
    gang.iter().take(reserved.len()).for_each(|one| drop(ledger.remove_claim(&one.name)));
    for (pod, nomination) in nominations {
        // Ignore errors: the ledger refuses only nominations for pods with a claim.
        let _ = ledger.nominate(pod, nomination);
    }
    search.undo_gang(ledger, key, (at, verdict.clone()));
    Err((gang.get(at).copied().unwrap_or(head), verdict))
}
