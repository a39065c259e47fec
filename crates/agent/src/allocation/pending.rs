//! Which containers the kubelet is still to ask slices for, and on which device some are held for
//! each. Pure: the time is an argument.
//!
//! What is known comes from three sides, none of which says it all: the API server has the pods
//! that are bound to the node, with the operator's note of what is held for them; `Allocate` was
//! answered, which names no pod; and the kubelet lists who holds what, later, and says nothing of
//! init containers. An answer is taken for that of a container of its size which it was held for;
//! when the kubelet then lists it for another, the two have swapped.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cleave_kubelet::HeldDevices;

use crate::gpu::layout::parse_id;

/// How long after an answer the kubelet lists the pod that it was for, at the latest.
const LISTED: Duration = Duration::from_secs(2);
/// Answers that no pod is known for; more than a node admits before the watch brings them.
const EARLY: usize = 128;

/// A pod that is bound to this node, and asks for slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// It is being deleted: it may never ask.
    pub leaving: bool,
    /// The kubelet has admitted it: it has asked for all.
    pub admitted: bool,
    /// What its containers ask for, in the kubelet's order.
    pub wants: Vec<Want>,
}

/// What one container asks for of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// The container.
    pub container: String,
    /// The extended resource.
    pub resource: String,
    /// How many: the size of the kubelet's request.
    pub units: u32,
    /// Which of the pod's asks it is a part of: these have to be on one device.
    pub ask: usize,
    /// What this container and those before it need together of the ask.
    pub needed: u32,
    /// The device on which the ask is held.
    pub held: Option<String>,
}

/// What is kept of a device for one ask of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept<'a> {
    /// The GPU or MIG device.
    pub device: &'a str,
    /// Units that are still to be given.
    pub units: u32,
    /// Sizes of the requests that will come for them.
    pub sizes: Vec<u32>,
}

/// How far a container's request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has not come.
    Wanted,
    /// It was answered, as far as anybody can say.
    Given(Instant),
    /// The kubelet says so.
    Served,
}

#[derive(Debug, Clone)]
struct Part {
    want: Want,
    /// The hold that it stands for. Another's, where they have swapped.
    note: Option<String>,
    state: State,
    /// Where it was given slices, if that is known.
    given: Option<String>,
}

#[derive(Debug, Clone)]
struct Pod {
    namespace: String,
    name: String,
    leaving: bool,
    admitted: bool,
    /// How many came before it: the kubelet hears of pods in the same order, and admits one after
    /// the other.
    order: u64,
    /// A list that was asked for before says nothing of it, but perhaps of one with its name.
    since: Instant,
    parts: Vec<Part>,
}

#[derive(Debug, Clone)]
struct Answer {
    resource: String,
    units: u32,
    device: String,
    at: Instant,
}

/// Where pods come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Feed {
    /// From nowhere: nobody waits for one.
    #[default]
    Off,
    /// It works, or is not known not to.
    Open,
    /// It fails.
    Failing,
    /// It fails, and somebody has waited in vain.
    GivenUp,
}

/// The containers that the kubelet is still to ask for, as far as is known.
#[derive(Debug, Clone, Default)]
pub struct PendingAllocations {
    feed: Feed,
    pods: BTreeMap<String, Pod>,
    came: u64,
    early: Vec<Answer>,
}

/// A part of a pod.
type Place = (String, usize);

impl PendingAllocations {
    /// None yet, but somebody will tell.
    pub fn watched() -> Self {
        Self { feed: Feed::Open, ..Self::default() }
    }

    /// The API server answers, or does not.
    pub fn answers(&mut self, well: bool) {
        self.feed = match (self.feed, well) {
            (Feed::Off, _) => Feed::Off,
            (_, true) => Feed::Open,
            (Feed::GivenUp, false) => Feed::GivenUp,
            (_, false) => Feed::Failing,
        };
    }

    /// Somebody waited for a pod that did not come.
    pub fn in_vain(&mut self) {
        if self.feed == Feed::Failing {
            self.feed = Feed::GivenUp;
        }
    }

    /// Whether a request of this size is some known container's, or there is no use in waiting for
    /// it to be.
    pub fn knows(&self, resource: &str, units: u32) -> bool {
        let wanted = |part: &Part| part.is(resource, units) && part.state == State::Wanted;
        matches!(self.feed, Feed::Off | Feed::GivenUp) || self.pods.values().flat_map(|pod| &pod.parts).any(wanted)
    }

    /// What is kept of a resource for pods that have not asked yet, those first that the kubelet
    /// will ask for first.
    pub fn kept(&self, resource: &str) -> Vec<Kept<'_>> {
        let mut staying: Vec<&Pod> = self.pods.values().filter(|pod| !pod.leaving).collect();
        staying.sort_by_key(|pod| pod.turn());
        staying.into_iter().flat_map(|pod| pod.kept(resource)).collect()
    }

    /// The UID of a pod of this node.
    pub fn uid(&self, namespace: &str, name: &str) -> Option<&str> {
        let is = |pod: &Pod| (pod.namespace.as_str(), pod.name.as_str()) == (namespace, name);
        self.pods.iter().find(|(_, pod)| is(pod)).map(|(uid, _)| uid.as_str())
    }

    /// The API server's word on a pod.
    pub fn pod(&mut self, bound: Bound, now: Instant) {
        let Bound { uid, namespace, name, leaving, admitted, wants } = bound;
        let parts =
            wants.into_iter().map(|want| Part { note: want.held.clone(), want, state: State::Wanted, given: None });
        self.came += 1;
        let fresh = Pod { namespace, name, leaving, admitted, order: self.came, since: now, parts: parts.collect() };
        let pod = self.pods.entry(uid.clone()).or_insert_with(|| fresh.clone());
        (pod.leaving, pod.admitted) = (fresh.leaving, fresh.admitted);
        for (part, Part { want, note, .. }) in pod.parts.iter_mut().zip(fresh.parts) {
            if part.want.held != want.held && part.state == State::Wanted {
                part.note = note;
            }
            part.want = want;
        }
        for index in 0..pod.parts.len() {
            let place = (uid.clone(), index);
            self.take_early(&place);
            if admitted {
                self.admits(&place);
            }
        }
        self.settle();
    }

    /// A pod is gone, or has ended.
    pub fn gone(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// All pods that there are.
    pub fn only(&mut self, uids: &BTreeSet<String>) {
        self.pods.retain(|uid, _| uids.contains(uid));
    }

    /// `Allocate` was answered with so many slices of a device.
    pub fn answered(&mut self, resource: &str, units: u32, device: &str, now: Instant) {
        if self.feed == Feed::Off {
            return;
        }
        let fit = |pod: &Pod, part: &Part| {
            let same = part.note.as_deref() == Some(device);
            (!same, pod.leaving, part.note.is_some(), pod.turn())
        };
        let wanted = self.places(|_, part| part.is(resource, units) && part.state == State::Wanted);
        let best = wanted.min_by_key(|(_, pod, part)| fit(pod, part)).map(|(place, _, _)| place);
        if let Some(part) = best.and_then(|place| self.part(&place)) {
            (part.state, part.given) = (State::Given(now), Some(device.to_owned()));
            self.settle();
            return;
        }
        if self.early.len() == EARLY {
            self.early.remove(0);
        }
        self.early.push(Answer { resource: resource.to_owned(), units, device: device.to_owned(), at: now });
    }

    /// The kubelet's list, asked at `asked`.
    pub fn listed(&mut self, rows: &[HeldDevices], asked: Instant) {
        for row in rows {
            let Some((device, _)) = row.ids.first().and_then(|id| parse_id(id)) else { continue };
            let of_row = self.places(|pod, part| {
                (pod.namespace.as_str(), pod.name.as_str()) == (row.namespace.as_str(), row.pod.as_str())
                    && (part.want.container.as_str(), part.want.resource.as_str())
                        == (row.container.as_str(), row.resource.as_str())
                    && pod.since <= asked
            });
            let found: Vec<Place> = of_row.map(|(place, _, _)| place).collect();
            for place in found {
                self.serves(&place, device);
            }
        }
        for pod in self.pods.values_mut().filter(|pod| !pod.admitted) {
            if pod.parts.iter().any(|part| part.state == State::Served) {
                continue;
            }
            // It was another's answer, and that one is gone.
            for part in &mut pod.parts {
                if matches!(part.state, State::Given(at) if at + LISTED < asked) {
                    (part.state, part.given) = (State::Wanted, None);
                }
            }
        }
        self.early.retain(|answer| answer.at + LISTED >= asked);
        self.settle();
    }

    /// The kubelet lists a container with a device: it has asked, and so have those before it.
    fn serves(&mut self, place: &Place, device: &str) {
        let (uid, last) = place;
        let Some(pod) = self.pods.get(uid) else { return };
        let Some(ask) = pod.parts.get(*last).map(|part| part.want.ask) else { return };
        for index in 0..=*last {
            let place = (uid.clone(), index);
            let Some(part) = self.part(&place) else { continue };
            let here = (part.want.ask == ask).then(|| device.to_owned());
            if part.state == State::Served && (here.is_none() || part.given == here) {
                continue;
            }
            let Part { want, given, .. } = part.clone();
            (part.state, part.given) = (State::Served, here.clone().or(part.given.take()));
            if here.is_some() && given == here {
                continue;
            }
            // The answer that was this one's was taken for another's: that one gets what was taken
            // for this one's.
            let taken = |other: &Place, part: &Part| {
                let open = matches!(part.state, State::Given(_)) && part.is(&want.resource, want.units);
                open && *other != place && part.given == here
            };
            let other = self.all().find(|(other, _, part)| taken(other, part)).map(|(other, _, _)| other);
            if let Some(other) = other.and_then(|other| self.part(&other)) {
                if given.is_none() {
                    other.state = State::Wanted;
                }
                other.given = given;
            } else if let Some(here) = &here {
                let this = |answer: &Answer| {
                    answer.resource == want.resource && answer.units == want.units && answer.device == *here
                };
                if let Some(index) = self.early.iter().position(this) {
                    self.early.remove(index);
                }
            }
        }
    }

    /// The kubelet has admitted a container's pod: it was answered. If that was taken for
    /// another's, that one still waits.
    fn admits(&mut self, place: &Place) {
        let Some(part) = self.part(place) else { return };
        let was = std::mem::replace(&mut part.state, State::Served);
        let Part { want, note, .. } = part.clone();
        if was != State::Wanted {
            return;
        }
        let taken = |pod: &Pod, part: &Part| {
            part.is(&want.resource, want.units) && matches!(part.state, State::Given(_)) && !pod.admitted
        };
        let others = self.places(taken);
        let other = others.min_by_key(|(_, _, other)| other.given != note).map(|(place, _, _)| place);
        let Some(other) = other.and_then(|other| self.part(&other)) else { return };
        other.state = State::Wanted;
        let given = other.given.take();
        if let Some(part) = self.part(place) {
            part.given = given;
        }
    }

    /// An answer of before the pod was known.
    fn take_early(&mut self, place: &Place) {
        let Some(Part { want, note, state: State::Wanted, .. }) = self.part(place).cloned() else { return };
        let of_size = self.early.iter().enumerate();
        let of_size = of_size.filter(|(_, answer)| answer.resource == want.resource && answer.units == want.units);
        let best = of_size.min_by_key(|(_, answer)| Some(&answer.device) != note.as_ref()).map(|(index, _)| index);
        let Some(Answer { device, at, .. }) = best.map(|index| self.early.remove(index)) else { return };
        if let Some(part) = self.part(place) {
            (part.state, part.given) = (State::Given(at), Some(device));
        }
    }

    /// Who was given slices elsewhere than they were held for it has swapped with the one that they
    /// were held for.
    fn settle(&mut self) {
        let elsewhere = |part: &Part| part.state != State::Wanted && part.given.is_some() && part.given != part.note;
        // First those with each other of which both were given something.
        for waiting in [false, true] {
            let strayed: Vec<Place> = self.places(|_, part| elsewhere(part)).map(|(place, _, _)| place).collect();
            for place in strayed {
                let Some(Part { want, note: Some(note), given, .. }) =
                    self.part(&place).filter(|part| elsewhere(part)).cloned()
                else {
                    continue;
                };
                let has_its = |part: &Part| {
                    let right = if waiting { part.state == State::Wanted } else { elsewhere(part) };
                    right && part.is(&want.resource, want.units) && part.note == given
                };
                let other = self.places(|_, part| has_its(part)).map(|(place, _, _)| place).next();
                let Some(other) = other.and_then(|other| self.part(&other)) else { continue };
                other.note = Some(note);
                if let Some(part) = self.part(&place) {
                    part.note = given;
                }
            }
        }
        // What is known to be served stands for no hold any more: pods that come later have their
        // own.
        for part in self.pods.values_mut().flat_map(|pod| &mut pod.parts) {
            if part.state == State::Served && part.given.is_some() {
                part.note.clone_from(&part.given);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = (Place, &Pod, &Part)> {
        self.pods.iter().flat_map(|(uid, pod)| {
            pod.parts.iter().enumerate().map(move |(index, part)| ((uid.clone(), index), pod, part))
        })
    }

    fn places<'a>(
        &'a self,
        which: impl Fn(&Pod, &Part) -> bool + 'a,
    ) -> impl Iterator<Item = (Place, &'a Pod, &'a Part)> {
        self.all().filter(move |(_, pod, part)| which(pod, part))
    }

    fn part(&mut self, (uid, index): &Place) -> Option<&mut Part> {
        self.pods.get_mut(uid)?.parts.get_mut(*index)
    }
}

impl Part {
    fn is(&self, resource: &str, units: u32) -> bool {
        self.want.units == units && self.want.resource == resource
    }
}

impl Pod {
    /// When the kubelet asks for it: the one that it is in the middle of is first.
    fn turn(&self) -> (bool, u64) {
        (!self.parts.iter().any(|part| part.state != State::Wanted), self.order)
    }

    /// What is kept for each of its asks.
    fn kept(&self, resource: &str) -> impl Iterator<Item = Kept<'_>> {
        let asks: BTreeSet<usize> =
            self.parts.iter().filter(|part| part.want.resource == resource).map(|part| part.want.ask).collect();
        asks.into_iter().filter_map(|ask| {
            let parts = || self.parts.iter().filter(move |part| part.want.ask == ask);
            let wanted = || parts().filter(|part| part.state == State::Wanted);
            let whole = parts().map(|part| part.want.needed).max()?;
            let given = parts().filter(|part| part.state != State::Wanted).map(|part| part.want.needed).max();
            let device = wanted().next_back()?.note.as_deref()?;
            let units = whole.saturating_sub(given.unwrap_or(0));
            Some(Kept { device, units, sizes: wanted().map(|part| part.want.units).collect() })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MPS: &str = "nvidia.com/gpu-mps";

    /// A pod with containers of these sizes, each an ask of its own, held on these devices.
    fn bound(name: &str, wants: &[(u32, &str)]) -> Bound {
        let want = |(index, &(units, device)): (usize, &(u32, &str))| Want {
            container: format!("c{index}"),
            resource: MPS.into(),
            units,
            ask: index,
            needed: units,
            held: (!device.is_empty()).then(|| device.to_owned()),
        };
        Bound {
            uid: format!("uid-{name}"),
            namespace: "ns".into(),
            name: name.into(),
            leaving: false,
            admitted: false,
            wants: wants.iter().enumerate().map(want).collect(),
        }
    }

    fn row(pod: &str, container: &str, device: &str, units: u32) -> HeldDevices {
        HeldDevices {
            namespace: "ns".into(),
            pod: pod.into(),
            container: container.into(),
            resource: MPS.into(),
            ids: (0..units).map(|unit| format!("{device}::{unit}")).collect(),
        }
    }

    fn kept(pending: &PendingAllocations) -> Vec<(&str, u32, Vec<u32>)> {
        pending.kept(MPS).into_iter().map(|kept| (kept.device, kept.units, kept.sizes)).collect()
    }

    fn with(pods: &[Bound], now: Instant) -> PendingAllocations {
        let mut pending = PendingAllocations::watched();
        pods.iter().for_each(|pod| pending.pod(pod.clone(), now));
        pending
    }

    #[test]
    fn what_is_held_is_kept_until_it_was_answered_with() {
        let now = Instant::now();
        let mut pending = with(&[bound("a", &[(3, "A"), (2, "B")])], now);
        assert_eq!(kept(&pending), [("A", 3, vec![3]), ("B", 2, vec![2])]);
        assert!(pending.knows(MPS, 3) && !pending.knows(MPS, 4) && !pending.knows("other", 3));
        assert!(pending.kept("other").is_empty());
        pending.answered(MPS, 3, "A", now);
        assert_eq!(kept(&pending), [("B", 2, vec![2])]);
        assert!(!pending.knows(MPS, 3), "used up");
        pending.listed(&[row("a", "c0", "A", 3)], now);
        assert!(!pending.knows(MPS, 3));
        pending.gone("uid-a");
        assert!(kept(&pending).is_empty());
    }

    #[test]
    fn of_two_alike_the_one_whose_device_was_taken_is_served_and_the_kubelet_has_the_last_word() {
        let now = Instant::now();
        let mut pending = with(&[bound("a", &[(3, "A")]), bound("b", &[(3, "B")])], now);
        pending.answered(MPS, 3, "B", now);
        assert_eq!(kept(&pending), [("A", 3, vec![3])]);
        pending.listed(&[row("a", "c0", "B", 3)], now);
        assert_eq!(kept(&pending), [("A", 3, vec![3])], "they have swapped");
        let mut ended = bound("a", &[(3, "A")]);
        ended.admitted = true;
        pending.pod(ended, now);
        pending.gone("uid-a");
        assert_eq!(kept(&pending), [("A", 3, vec![3])], "it is b's now");
        pending.answered(MPS, 3, "A", now);
        assert!(!pending.knows(MPS, 3));
    }

    #[test]
    fn taken_elsewhere_than_held_the_hold_is_still_somebodys() {
        let now = Instant::now();
        let mut pending = with(&[bound("a", &[(3, "A")]), bound("b", &[(3, "B")])], now);
        pending.listed(&[row("a", "c0", "B", 3)], now);
        assert_eq!(kept(&pending), [("A", 3, vec![3])], "without the answer too: another agent gave it");
    }

    #[test]
    fn an_answer_that_no_pod_turns_up_for_counts_no_more_after_a_while() {
        let now = Instant::now();
        let mut pending = with(&[bound("a", &[(3, "A")])], now);
        pending.answered(MPS, 3, "A", now);
        pending.listed(&[], now + LISTED);
        assert!(!pending.knows(MPS, 3), "it may not be listed yet");
        pending.listed(&[], now + 2 * LISTED);
        assert_eq!(kept(&pending), [("A", 3, vec![3])]);
    }

    #[test]
    fn an_answer_may_come_before_its_pod() {
        let now = Instant::now();
        let mut pending = PendingAllocations::watched();
        pending.answered(MPS, 3, "B", now);
        pending.pod(bound("a", &[(3, "A")]), now);
        assert!(!pending.knows(MPS, 3), "it was answered already");
        pending.pod(bound("b", &[(3, "B")]), now);
        assert!(pending.knows(MPS, 3));
        // It was b's answer, or a's: whichever, A is what is left.
        assert_eq!(kept(&pending), [("A", 3, vec![3])]);
        let mut late = PendingAllocations::watched();
        late.answered(MPS, 3, "A", now);
        late.listed(&[], now + 2 * LISTED);
        late.pod(bound("a", &[(3, "A")]), now + 2 * LISTED);
        assert!(late.knows(MPS, 3), "that answer was for another");
    }

    #[test]
    fn what_the_kubelet_has_admitted_or_what_leaves_is_kept_nothing_for() {
        let now = Instant::now();
        let admitted = Bound { admitted: true, ..bound("a", &[(3, "A")]) };
        let leaving = Bound { leaving: true, ..bound("b", &[(4, "B")]) };
        let pending = with(&[admitted, leaving], now);
        assert!(kept(&pending).is_empty());
        assert!(!pending.knows(MPS, 3));
        assert!(pending.knows(MPS, 4), "it may ask all the same: nobody waits for another");
    }

    #[test]
    fn init_containers_are_on_the_device_of_their_ask_and_served_when_a_later_container_is() {
        let now = Instant::now();
        let want = |container: &str, units, needed| Want {
            container: container.into(),
            resource: MPS.into(),
            units,
            ask: 0,
            needed,
            held: Some("A".into()),
        };
        let pod = Bound { wants: vec![want("init", 2, 2), want("main", 5, 5)], ..bound("a", &[]) };
        let mut pending = with(std::slice::from_ref(&pod), now);
        assert_eq!(kept(&pending), [("A", 5, vec![2, 5])]);
        pending.answered(MPS, 2, "A", now);
        assert_eq!(kept(&pending), [("A", 3, vec![5])]);
        let mut restarted = with(&[pod], now);
        restarted.listed(&[row("a", "main", "A", 5)], now);
        assert!(!restarted.knows(MPS, 2) && kept(&restarted).is_empty());
    }

    #[test]
    fn a_list_that_is_older_than_the_pod_speaks_of_another_of_its_name() {
        let now = Instant::now();
        let mut pending = with(&[bound("a", &[(3, "A")])], now + LISTED);
        pending.listed(&[row("a", "c0", "B", 3)], now);
        assert_eq!(kept(&pending), [("A", 3, vec![3])]);
    }

    #[test]
    fn a_note_that_changes_is_followed_and_pods_that_a_new_list_lacks_are_gone() {
        let now = Instant::now();
        let mut pending = with(&[bound("a", &[(3, "A")]), bound("b", &[(1, "")])], now);
        pending.pod(bound("a", &[(3, "B")]), now);
        assert_eq!(kept(&pending), [("B", 3, vec![3])]);
        assert!(pending.knows(MPS, 1), "known, and nothing is held for it");
        pending.only(&BTreeSet::from(["uid-b".to_owned()]));
        assert!(kept(&pending).is_empty() && pending.knows(MPS, 1));
    }

    #[test]
    fn nobody_waits_where_no_pod_can_come() {
        let mut pending = PendingAllocations::default();
        assert!(pending.knows(MPS, 1));
        pending.answers(true);
        assert!(pending.knows(MPS, 1), "there is no API server");
        let mut pending = PendingAllocations::watched();
        assert!(!pending.knows(MPS, 1));
        pending.in_vain();
        assert!(!pending.knows(MPS, 1), "the next one may come in time");
        pending.answers(false);
        assert!(!pending.knows(MPS, 1), "it may answer again in time");
        pending.in_vain();
        assert!(pending.knows(MPS, 1), "it does not");
        pending.answers(true);
        assert!(!pending.knows(MPS, 1));
    }
}
