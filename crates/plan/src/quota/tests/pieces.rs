//! Tests pods that use several GPUs, and pods that must not borrow.
use super::super::{Book, Class, Guarantee, Kind, Owner, Piece, Place, Pod, PodId, Quota, World};
use super::worlds::{settings, tenths};
use crate::ledger::Moment;

/// Returns a pod of a quota that requests parts of GPUs. With `on`, the pod runs on these GPUs
/// since this time.
fn pod(name: &str, quota: &str, pieces: &[u64], on: Option<(&[usize], u64)>) -> Pod {
    let charge = tenths(pieces.iter().sum());
    let gpus = on.map_or(&[][..], |(gpus, _)| gpus);
    let piece = |(at, size): (usize, &u64)| Piece { charge: tenths(*size), gpu: gpus.get(at).copied() };
    Pod {
        name: name.to_owned(),
        owner: Owner::Quota(quota.to_owned()),
        charge,
        priority: 0,
        created: Moment(1),
        place: match on {
            Some((gpus, since)) => Place::Running { gpu: gpus[0], since: Moment(since) },
            None => Place::Waiting { nominated: None },
        },
        borrows: true,
        preempts: true,
        protected: None,
        gang: None,
        pieces: if pieces.len() > 1 { pieces.iter().enumerate().map(piece).collect() } else { Vec::new() },
        gpus: None,
    }
}

fn world(gpus: usize, cells: u64, pods: Vec<Pod>) -> World {
    let quota = |min: u64| Quota::new(tenths(min * 10)).with_guarantee(Guarantee::Cells).unwrap();
    let quotas = [("a".to_owned(), quota(cells)), ("b".to_owned(), quota(1))].into();
    World { gpus: vec![tenths(10); gpus], quotas, pods, settings: settings() }
}

#[test]
fn a_pod_of_several_gpus_needs_as_many_cells() {
    for (pieces, cells, is_within) in [
        (&[10, 10][..], 1, false),
        (&[10, 10], 2, true),
        (&[5, 5], 1, true),
        (&[6, 5], 1, false),
        (&[6, 5, 4], 2, true),
        (&[10; 8], 7, false),
        (&[10; 8], 8, true),
    ] {
        let world = world(9, cells, vec![pod("p", "a", pieces, None)]);
        let rights = Book::new(&world, Moment(9)).rights(PodId(0)).unwrap();
        assert_eq!(rights.is_within, is_within, "{pieces:?} in {cells} cells");
    }
}

#[test]
fn the_class_depends_on_all_gpus_of_a_pod() {
    let pods = vec![pod("b1", "b", &[5], Some((&[1], 1))), pod("a1", "a", &[10, 5], None)];
    let world = world(3, 2, pods);
    let mut book = Book::new(&world, Moment(9));
    let on = |gpus: [usize; 2]| gpus.map(|gpu| (PodId(1), gpu));
    assert_eq!(book.class_with(&on([0, 1]), &[]), Class::Over, "the second GPU is of another quota");
    assert_eq!(book.class_with(&on([0, 2]), &[]), Class::In);
    assert!(!book.is_legal(Kind::Reclaim, &on([0, 1]), &[]) && book.is_legal(Kind::Reclaim, &on([0, 2]), &[]));
    book.release(&on([0, 2]));
    let usage = book.usage("a").unwrap();
    assert_eq!((usage.used, usage.cells, usage.pods_within), (tenths(15), Some(2), 1), "counted once");
    book.evict(PodId(1));
    assert_eq!((book.usage("a").unwrap().used, book.usage("a").unwrap().cells), (tenths(0), Some(0)));
}

#[test]
fn a_running_pod_owns_each_of_its_gpus() {
    let pods = vec![pod("a1", "a", &[10, 10], Some((&[0, 1], 1))), pod("b1", "b", &[5], Some((&[1], 2)))];
    let world = world(3, 2, pods);
    let book = Book::new(&world, Moment(9));
    assert_eq!((book.class(PodId(0)), book.class(PodId(1))), (Some(Class::In), Some(Class::Over)));
    assert_eq!((book.usage("a").unwrap().cells, book.usage("b").unwrap().cells), (Some(2), Some(0)));
}

#[test]
fn a_pod_costs_what_it_costs_on_its_gpu() {
    let mut world = world(2, 0, vec![pod("a1", "a", &[5], None), pod("a2", "a", &[5], None)]);
    world.quotas.insert("a".to_owned(), Quota::new(tenths(9)).with_max(Some(tenths(9))).unwrap());
    let mut book = Book::new(&world, Moment(9));
    book.release(&[(PodId(0), 0)]);
    assert!(book.rights(PodId(1)).unwrap().is_over_max);
    book.set_charge(PodId(1), tenths(4));
    assert!(!book.rights(PodId(1)).unwrap().is_over_max);
    book.release(&[(PodId(1), 0)]);
    assert_eq!(book.usage("a").unwrap().used, tenths(9));
}

#[test]
fn a_pod_that_does_not_borrow_is_within_the_guarantee_before_more_important_pods() {
    let never = Pod { borrows: false, ..pod("never", "a", &[5], Some((&[0], 1))) };
    let high = Pod { priority: 9, ..pod("high", "a", &[5], Some((&[1], 2))) };
    let waiting = Pod { priority: 9, ..pod("waiting", "a", &[5], None) };
    let mut world = world(3, 0, vec![never, high, waiting, pod("b1", "b", &[5], None)]);
    world.quotas = [("a", 5), ("b", 5)].map(|(name, min)| (name.to_owned(), Quota::new(tenths(min)))).into();
    let book = Book::new(&world, Moment(9));
    assert_eq!((book.class(PodId(0)), book.class(PodId(1))), (Some(Class::In), Some(Class::Over)));
    let may_leave = |kind, taker, victim| book.may_leave(kind, PodId(taker), PodId(victim));
    assert!(!may_leave(Kind::Reclaim, 3, 0) && may_leave(Kind::Reclaim, 3, 1));
    // Only a more important pod of the same quota may evict the pod, and is then within the
    // guarantee.
    assert!(may_leave(Kind::Priority, 2, 0));
    assert_eq!(book.class_with(&[(PodId(2), 0)], &[]), Class::Over);
    assert_eq!(book.class_with(&[(PodId(2), 0)], &[PodId(0), PodId(1)]), Class::In);
}

#[test]
fn a_terminating_pod_counts_on_each_of_its_gpus() {
    let leaving = Pod { place: Place::Leaving { gpu: 0, held: true }, ..pod("a1", "a", &[10, 10], Some((&[0, 1], 1))) };
    let borrowers = [2, 3].map(|gpu| pod(&format!("b{gpu}"), "b", &[10], Some((&[gpu], 2))));
    let pods = [leaving, pod("a2", "a", &[10, 10], None)].into_iter().chain(borrowers).collect();
    for (cells, is_legal) in [(3, false), (4, true)] {
        let world = world(4, cells, Vec::clone(&pods));
        let book = Book::new(&world, Moment(9));
        let parts = [(PodId(1), 2), (PodId(1), 3)];
        assert_eq!(book.is_legal(Kind::Reclaim, &parts, &[PodId(2), PodId(3)]), is_legal, "{cells} cells");
    }
}
