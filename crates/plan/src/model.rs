//! Prepares a snapshot for planning: names become indices, equal pods and equal GPUs are grouped,
//! and invalid parts are excluded.
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use crate::device::{self, Families, Family, Mode};
use crate::mig::{Instance, ProfileTable};
use crate::mps::MAX_CLIENTS;
use crate::partition::{
    GpuClass, GpuDemand, GpuUsage, InstanceSharing, ResourceId, ResourceKind, SharedTable, SliceCell, merge_cells,
};
use crate::policy::Policy;
use crate::scheduling::{NodeConstraints, PODS_RESOURCE, UNLIMITED_BY_DEFAULT};
use crate::snapshot::{Gpu, Node, Pod, SliceGroup, Snapshot};
use crate::states::{ClassId, DemandId};

/// Maximum number of slices of one resource that a pod may request. A pod that requests a million
/// slices must not delay the plan.
const MAX_SLICES_PER_POD: u64 = 1024;

/// Maximum number of equal slices of one GPU. No mode allows more, and a plan lists each slice.
const MAX_EQUAL_SLICES: u32 = 4096;

pub(crate) struct Model<'a> {
    /// Nodes by name.
    pub(crate) nodes: Vec<NodeModel<'a>>,
    /// GPUs by node, then by index.
    pub(crate) gpus: Vec<GpuModel<'a>>,
    /// Groups by priority, highest first.
    pub(crate) groups: Vec<PodGroup<'a>>,
    /// For each pod, its index in `groups`. `None` for a pod that cannot be planned.
    pub(crate) group_of: Vec<Option<u32>>,
    /// For each pod, its node in the last plan.
    pub(crate) planned: Vec<Option<u32>>,
    /// Why each pod without a group cannot be planned, by the pod's index.
    pub(crate) unplannable_pods: BTreeMap<u32, String>,
    /// Resources other than GPUs that pods request, and `pods` if a node limits them.
    pub(crate) dimensions: Vec<&'a str>,
    pub(crate) resources: Vec<String>,
    pub(crate) classes: Vec<GpuClass>,
    pub(crate) demands: Vec<GpuDemand>,
}

pub(crate) struct NodeModel<'a> {
    pub(crate) node: &'a Node,
    pub(crate) gpus: Range<u32>,
    pub(crate) exclusion: Option<String>,
    /// Free amounts by dimension, in thousandths.
    pub(crate) free: Vec<u64>,
}

pub(crate) struct GpuModel<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) class: ClassId,
    /// Why the GPU is not repartitioned. `None` if the GPU can be repartitioned, if the policy
    /// forbids repartitioning, or if only the node is excluded.
    pub(crate) note: Option<String>,
}

/// Pods with the same priority, requests and node constraints.
pub(crate) struct PodGroup<'a> {
    pub(crate) priority: i32,
    /// Demands of one pod. All shares that a pod requests of one resource are one demand. Each
    /// other slice is a separate demand.
    pub(crate) units: Vec<DemandId>,
    /// Id of the group's units. Groups with the same units have the same id.
    pub(crate) shape: u32,
    /// Amounts by dimension, in thousandths.
    pub(crate) needs: Vec<(u16, u64)>,
    pub(crate) constraints: NodeConstraints<'a>,
    /// Pods in order of arrival.
    pub(crate) pods: Vec<u32>,
    /// Nodes on which one of the pods could run if no other pod were pending.
    pub(crate) nodes: Vec<u32>,
    /// The smallest part of a GPU that one of the pods uses.
    pub(crate) weight: GpuUsage,
}

/// Requests of a pod: GPU demands with their counts, and amounts by dimension in thousandths.
type PodRequests = (Vec<(GpuDemand, u32)>, Vec<(u16, u64)>);

/// Properties that all pods of a group have in common.
type PodGroupKey<'k> = (Reverse<i32>, &'k PodRequests, NodeConstraints<'k>);

/// Resource names with their ids and kinds.
struct ResourceNames<'a> {
    ids: BTreeMap<&'a str, (ResourceId, ResourceKind)>,
}

impl<'a> ResourceNames<'a> {
    fn from_snapshot(snapshot: &'a Snapshot, tables: &'a [Rc<ProfileTable>]) -> Self {
        let mut shares: BTreeSet<&str> =
            [device::SHARES_RESOURCE, device::REPLICAS_RESOURCE, "nvidia.com/gpu.shared"].into();
        let mut all: BTreeSet<&str> = [device::WHOLE_GPU_RESOURCE].into();
        for gpu in snapshot.nodes.iter().flat_map(|node| &node.gpus) {
            shares.extend(gpu.resource_name.as_deref());
            shares.extend(gpu.mig_sharing.iter().filter_map(|sharing| sharing.resource_name.as_deref()));
            all.extend(gpu.slices.iter().map(|slice| slice.resource.as_str()));
        }
        all.extend(tables.iter().flat_map(|table| table.resources()));
        all.extend(snapshot.pods.iter().flat_map(|pod| pod.requests.keys().map(String::as_str)));
        // A reserved name keeps its meaning, even if a policy uses it for shares.
        shares.retain(|name| kind_by_name(name).is_none());
        all.extend(&shares);
        let mut ids = BTreeMap::new();
        for name in all {
            let kind = if shares.contains(name) { Some(ResourceKind::Shares) } else { kind_by_name(name) };
            if let (Some(kind), Ok(id)) = (kind, ResourceId::try_from(ids.len())) {
                ids.insert(name, (id, kind));
            }
        }
        Self { ids }
    }

    fn id_and_kind(&self, name: &str) -> Option<(ResourceId, ResourceKind)> {
        self.ids.get(name).copied()
    }
}

fn kind_by_name(name: &str) -> Option<ResourceKind> {
    if name == device::WHOLE_GPU_RESOURCE {
        Some(ResourceKind::Whole)
    } else if let Some(profile) = name.strip_prefix(device::MIG_PREFIX) {
        Some(if profile.ends_with(device::SHARED_SUFFIX) { ResourceKind::Shares } else { ResourceKind::Mig })
    } else {
        device::sized_slice_gib(name).map(ResourceKind::Sized)
    }
}

/// The distinct tables of MIG profiles. GPUs with the same profiles share one table.
#[derive(Default)]
struct DistinctTables {
    all: Vec<Rc<ProfileTable>>,
    /// Index of the table, or why the GPU has none, by node and GPU in the snapshot's order.
    of: Vec<Vec<Result<usize, String>>>,
}

impl DistinctTables {
    fn from_snapshot(snapshot: &Snapshot) -> Self {
        let mut tables = Self::default();
        let mut reported = BTreeMap::new();
        let mut known = BTreeMap::new();
        for node in &snapshot.nodes {
            let mut of = Vec::with_capacity(node.gpus.len());
            for gpu in &node.gpus {
                let found = match &gpu.profiles {
                    Some(profiles) => reported
                        .entry(profiles)
                        .or_insert_with(|| ProfileTable::new(profiles).map_err(|error| error.to_string()))
                        .clone(),
                    None => known
                        .entry((&gpu.model, gpu.memory.as_mebibytes().unwrap_or(0)))
                        .or_insert_with_key(|(model, memory)| {
                            ProfileTable::built_in(model, *memory).ok_or_else(|| {
                                format!("the GPU reports no MIG profiles, and none are known for {model}")
                            })
                        })
                        .clone(),
                };
                of.push(found.map(|table| tables.intern_table(table)));
            }
            tables.of.push(of);
        }
        tables
    }

    /// Returns the index of an equal table, and adds the table if none exists.
    fn intern_table(&mut self, table: ProfileTable) -> usize {
        if let Some(at) = self.all.iter().position(|known| **known == table) {
            return at;
        }
        self.all.push(Rc::new(table));
        self.all.len() - 1
    }
}

impl<'a> Model<'a> {
    pub(crate) fn new(snapshot: &'a Snapshot, policy: &Policy) -> Self {
        let tables = DistinctTables::from_snapshot(snapshot);
        let mut model = Self {
            nodes: Vec::with_capacity(snapshot.nodes.len()),
            gpus: Vec::new(),
            groups: Vec::new(),
            group_of: vec![None; snapshot.pods.len()],
            planned: Vec::new(),
            unplannable_pods: BTreeMap::new(),
            dimensions: Vec::new(),
            resources: Vec::new(),
            classes: Vec::new(),
            demands: Vec::new(),
        };
        // `names` borrows from `tables`, which is dropped at the end of this function.
        let names = ResourceNames::from_snapshot(snapshot, &tables.all);
        model.resources = names.ids.keys().map(|name| (*name).to_owned()).collect();
        model.dimensions = dimensions(snapshot, &names);
        model.add_nodes(snapshot, policy, &names, &tables);
        model.add_pods(snapshot, &names);
        model.planned = model.planned_nodes(snapshot);
        model
    }

    fn add_nodes(
        &mut self,
        snapshot: &'a Snapshot,
        policy: &Policy,
        names: &ResourceNames<'_>,
        tables: &DistinctTables,
    ) {
        let mut order: Vec<usize> = (0..snapshot.nodes.len()).collect();
        // Nodes are sorted by name. The order of nodes with equal names must not depend on the
        // snapshot either.
        order.sort_by(|&a, &b| {
            let (a, b) = (&snapshot.nodes[a], &snapshot.nodes[b]);
            a.name.cmp(&b.name).then_with(|| normalized_node(a).cmp(&normalized_node(b)))
        });
        let mut classes: BTreeMap<GpuClass, ClassId> = BTreeMap::new();
        let builder = ClassBuilder::new(policy, names, tables);
        for (at, &index) in order.iter().enumerate() {
            let node = &snapshot.nodes[index];
            let same_name = |other: Option<&usize>| other.is_some_and(|&other| snapshot.nodes[other].name == node.name);
            let twice =
                same_name(order.get(at + 1)) || at.checked_sub(1).is_some_and(|before| same_name(order.get(before)));
            let (free, bad) = self.free_resources(node);
            let exclusion = match (&node.exclusion, twice) {
                (Some(reason), _) => Some(reason.clone()),
                (None, true) => Some("two nodes have this name".to_owned()),
                (None, false) => bad,
            };
            let first = as_u32(self.gpus.len());
            let mut gpus: Vec<usize> = (0..node.gpus.len()).collect();
            gpus.sort_by(|&a, &b| {
                let (a, b) = (&node.gpus[a], &node.gpus[b]);
                (a.index, &a.uuid).cmp(&(b.index, &b.uuid)).then_with(|| normalized_gpu(a).cmp(&normalized_gpu(b)))
            });
            for gpu_at in gpus {
                let gpu = &node.gpus[gpu_at];
                let table = tables.of.get(index).and_then(|of| of.get(gpu_at));
                let twice = node.gpus.iter().filter(|other| other.uuid == gpu.uuid).count() > 1;
                let (class, reason) = builder.class_of(gpu, table, exclusion.is_some(), twice);
                let next = as_u32(classes.len());
                let class = *classes.entry(class).or_insert(next);
                self.gpus.push(GpuModel { gpu, class, note: reason });
            }
            self.nodes.push(NodeModel { node, gpus: first..as_u32(self.gpus.len()), exclusion, free });
        }
        let mut in_order: Vec<(GpuClass, ClassId)> = classes.into_iter().collect();
        in_order.sort_unstable_by_key(|(_, id)| *id);
        self.classes = in_order.into_iter().map(|(class, _)| class).collect();
    }

    /// Returns the free amounts of a node by dimension, and the reason if one of its quantities is
    /// invalid.
    fn free_resources(&self, node: &Node) -> (Vec<u64>, Option<String>) {
        let mut bad = None;
        let mut amount = |of: &str, map: &BTreeMap<String, crate::quantity::Quantity>, name: &str| -> Option<u64> {
            let quantity = map.get(name)?;
            if quantity.milli().is_none() {
                bad.get_or_insert_with(|| format!("{of} {name} is {quantity}, which is not a quantity"));
            }
            quantity.milli()
        };
        let mut free = Vec::with_capacity(self.dimensions.len());
        for name in &self.dimensions {
            let default = if UNLIMITED_BY_DEFAULT.contains(name) { u64::MAX } else { 0 };
            let all = amount("allocatable", &node.allocatable, name).unwrap_or(default);
            let used = amount("requested", &node.requested, name).unwrap_or(0);
            free.push(if all == u64::MAX { all } else { all.saturating_sub(used) });
        }
        (free, bad)
    }

    fn add_pods(&mut self, snapshot: &'a Snapshot, names: &ResourceNames<'_>) {
        let mut seen = BTreeSet::new();
        let mut wanted: Vec<Option<PodRequests>> = Vec::with_capacity(snapshot.pods.len());
        for (index, pod) in snapshot.pods.iter().enumerate() {
            let read = self.pod_requests(pod, names);
            let read =
                if seen.insert(pod.name.as_str()) { read } else { Err("another pod has the same name".to_owned()) };
            wanted.push(match read {
                Ok(read) => Some(read),
                Err(reason) => {
                    self.unplannable_pods.insert(as_u32(index), reason);
                    None
                }
            });
        }
        let demands: BTreeSet<GpuDemand> =
            wanted.iter().flatten().flat_map(|(units, _)| units.iter().map(|unit| unit.0)).collect();
        self.demands = demands.into_iter().take(usize::from(DemandId::MAX)).collect();

        let mut groups: BTreeMap<PodGroupKey<'_>, Vec<u32>> = BTreeMap::new();
        for (index, (pod, wanted)) in snapshot.pods.iter().zip(&wanted).enumerate() {
            let Some(wanted) = wanted else { continue };
            let key = (Reverse(pod.priority), wanted, NodeConstraints::of_pod(pod));
            groups.entry(key).or_default().push(as_u32(index));
        }
        let mut shapes: BTreeMap<Vec<DemandId>, u32> = BTreeMap::new();
        for ((_, (units, needs), _), pods) in groups {
            let Some(pod) = pods.first().and_then(|&pod| snapshot.pods.get(pod as usize)) else { continue };
            let mut expanded = Vec::new();
            for (demand, count) in units {
                let id = self.demands.binary_search(demand).ok().and_then(|at| DemandId::try_from(at).ok());
                expanded.extend(std::iter::repeat_n(id, *count as usize));
            }
            let Some(expanded) = expanded.into_iter().collect::<Option<Vec<DemandId>>>() else {
                let reason = "the pending pods have too many different requests";
                self.unplannable_pods.extend(pods.iter().map(|&pod| (pod, reason.to_owned())));
                continue;
            };
            for &pod in &pods {
                if let Some(group) = self.group_of.get_mut(pod as usize) {
                    *group = u32::try_from(self.groups.len()).ok();
                }
            }
            let next = as_u32(shapes.len());
            let shape = *shapes.entry(expanded.clone()).or_insert(next);
            self.groups.push(PodGroup {
                priority: pod.priority,
                shape,
                units: expanded,
                needs: needs.clone(),
                constraints: NodeConstraints::of_pod(pod),
                pods,
                nodes: Vec::new(),
                weight: GpuUsage::default(),
            });
        }
    }

    fn planned_nodes(&self, snapshot: &Snapshot) -> Vec<Option<u32>> {
        let node = |pod: &Pod| {
            let name = pod.planned_node.as_deref()?;
            let at = self.nodes.binary_search_by(|node| node.node.name.as_str().cmp(name)).ok()?;
            u32::try_from(at).ok()
        };
        snapshot.pods.iter().map(node).collect()
    }

    /// Returns a pod's requests: units of Cleave's resources, and thousandths of other resources.
    ///
    /// # Errors Returns a clause that states which amount is not a valid quantity, is not a whole
    /// number or is too large.
    fn pod_requests(&self, pod: &Pod, names: &ResourceNames<'_>) -> Result<PodRequests, String> {
        let mut units = Vec::new();
        let mut needs = Vec::new();
        for (name, quantity) in &pod.requests {
            let milli = quantity
                .milli()
                .ok_or_else(|| format!("the requested amount of {name}, {quantity}, is not a quantity"))?;
            if milli == 0 {
                continue;
            }
            let Some((resource, kind)) = names.id_and_kind(name) else {
                let dimension =
                    self.dimensions.binary_search(&name.as_str()).ok().and_then(|at| u16::try_from(at).ok());
                needs.extend(dimension.map(|dimension| (dimension, milli)));
                continue;
            };
            let count = quantity
                .count()
                .ok_or_else(|| format!("the requested amount of {name}, {quantity}, is not a whole number"))?;
            let too_many = || format!("the pod requests {count} {name}, more than any node has");
            let count = u32::try_from(count)
                .ok()
                .filter(|&count| u64::from(count) <= MAX_SLICES_PER_POD)
                .ok_or_else(too_many)?;
            units.push(match kind {
                ResourceKind::Shares => (GpuDemand { resource, kind, units: count }, 1),
                _ => (GpuDemand { resource, kind, units: 1 }, count),
            });
        }
        if let Some(pods) = self.dimensions.binary_search(&PODS_RESOURCE).ok().and_then(|at| u16::try_from(at).ok()) {
            needs.retain(|(dimension, _)| *dimension != pods);
            needs.push((pods, 1000));
        }
        units.sort_unstable();
        needs.sort_unstable();
        Ok((units, needs))
    }

    pub(crate) fn gpu(&self, gpu: u32) -> Option<&GpuModel<'a>> {
        self.gpus.get(gpu as usize)
    }

    pub(crate) fn node(&self, node: u32) -> Option<&NodeModel<'a>> {
        self.nodes.get(node as usize)
    }

    pub(crate) fn resource(&self, resource: ResourceId) -> &str {
        self.resources.get(usize::from(resource)).map_or("", String::as_str)
    }
}

/// Returns the names of the resources other than GPUs that pods request, sorted. Includes the
/// number of pods if a node limits it.
fn dimensions<'a>(snapshot: &'a Snapshot, names: &ResourceNames<'_>) -> Vec<&'a str> {
    let requested = snapshot.pods.iter().flat_map(|pod| pod.requests.keys()).map(String::as_str);
    let mut all: BTreeSet<&str> = requested.filter(|name| names.id_and_kind(name).is_none()).collect();
    if snapshot.nodes.iter().any(|node| node.allocatable.contains_key(PODS_RESOURCE)) {
        all.insert(PODS_RESOURCE);
    }
    all.into_iter().collect()
}

/// Returns the node with sorted lists, for comparison with a node of the same name.
fn normalized_node(node: &Node) -> Node {
    let mut node = node.clone();
    node.gpus = node.gpus.iter().map(normalized_gpu).collect();
    node.gpus.sort();
    node.taints.sort();
    node
}

fn normalized_gpu(gpu: &Gpu) -> Gpu {
    let mut gpu = gpu.clone();
    gpu.slices.sort();
    gpu
}

pub(crate) fn as_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// Builds the classes of GPUs.
struct ClassBuilder<'b> {
    policy: &'b Policy,
    names: &'b ResourceNames<'b>,
    tables: &'b DistinctTables,
    /// For each table, the resources of its profiles and of shares of their instances.
    mig: Vec<MigNames>,
}

type MigNames = (Vec<(ResourceId, u8)>, Vec<(ResourceId, u8)>);

impl<'b> ClassBuilder<'b> {
    fn new(policy: &'b Policy, names: &'b ResourceNames<'b>, tables: &'b DistinctTables) -> Self {
        let of = |table: &Rc<ProfileTable>| {
            let with = |suffix: &str| {
                let id = |name: &str| names.id_and_kind(&format!("{name}{suffix}")).map(|(id, _)| id);
                table
                    .resources()
                    .zip(0_u8..)
                    .filter_map(|(name, profile)| Some((id(name)?, profile)))
                    .collect::<Vec<_>>()
            };
            (with(""), with(device::SHARED_SUFFIX))
        };
        Self { policy, names, tables, mig: tables.all.iter().map(of).collect() }
    }

    /// Returns the class of a GPU and, for an excluded GPU, the reason why plans exclude it.
    fn class_of(
        &self,
        gpu: &Gpu,
        table: Option<&Result<usize, String>>,
        node_out: bool,
        twice: bool,
    ) -> (GpuClass, Option<String>) {
        let mut note = None;
        let mut families = gpu.mode.families();
        let mut class = GpuClass {
            families: Families::NONE,
            memory: gpu.memory.as_mebibytes().unwrap_or(0),
            shares: None,
            sizes: gpu.sizes.unwrap_or(true),
            replicas: None,
            instance_sharing: None,
            mig: Vec::new(),
            mig_shared: Vec::new(),
            table: None,
            in_use: Vec::new(),
            free: Vec::new(),
        };
        self.set_partitions(gpu, &mut class, &mut note);
        let of_mig = |slice: &SliceGroup| slice.placement.is_some() || slice.resource.starts_with(device::MIG_PREFIX);
        if families.has(Family::Mig) || gpu.slices.iter().any(of_mig) {
            match table {
                Some(Ok(id)) => {
                    class.table =
                        self.tables.all.get(*id).map(|table| SharedTable { id: as_u32(*id), table: Rc::clone(table) });
                    if let Some((mig, shared)) = self.mig.get(*id) {
                        class.mig.clone_from(mig);
                        class.mig_shared.clone_from(shared);
                    }
                }
                Some(Err(reason)) if gpu.mode == Mode::Mig || gpu.slices.iter().any(of_mig) => {
                    note = Some(reason.clone());
                }
                _ => {}
            }
        }
        if class.memory == 0 && (families.has(Family::Mps)) {
            note = Some(format!("{} is not a valid memory size of a GPU", gpu.memory));
        }
        if let Err(reason) = self.read_slices(gpu, &mut class) {
            note = Some(reason);
        }
        if gpu.mode == Mode::Unknown {
            note = Some("this version does not know the GPU's mode".to_owned());
        }
        let out = match (&gpu.exclusion, twice) {
            (Some(reason), _) => Some(reason.clone()),
            (None, true) => Some("another GPU of the node has the same UUID".to_owned()),
            (None, false) => None,
        };
        if out.is_some() || node_out {
            class.free.clear();
            families = Families::NONE;
        }
        if note.is_some() || gpu.fixed {
            families = Families::NONE;
        }
        class.families = families;
        (class, out.or(note))
    }

    /// Sets the shares and replicas that the GPU and its MIG instances can have.
    fn set_partitions(&self, gpu: &Gpu, class: &mut GpuClass, note: &mut Option<String>) {
        let name = |default: &str| {
            let name = gpu.resource_name.as_deref().unwrap_or(default);
            self.names.id_and_kind(name).filter(|(_, kind)| *kind == ResourceKind::Shares).map(|(id, _)| id)
        };
        let mut number = |what: &str, own: Option<u32>, policy: Option<u32>, most: u32| {
            let units = own.or(policy)?;
            if units == 0 || units > most {
                *note = Some(format!("{units} {what}: the number must be from 1 to {most}"));
            }
            (1..=most).contains(&units).then_some(units)
        };
        if gpu.mode.families().has(Family::Mps) {
            let units = number("MPS shares", gpu.units, self.policy.units, MAX_CLIENTS);
            class.shares = name(device::SHARES_RESOURCE).zip(units);
        }
        if gpu.mode.families().has(Family::TimeSlicing) {
            let replicas = number("replicas", gpu.replicas, self.policy.replicas, MAX_EQUAL_SLICES);
            // If shares and replicas have the same name, the name means MPS shares.
            let other = |id: &ResourceId| class.shares.is_none_or(|(shares, _)| shares != *id);
            class.replicas = name(device::REPLICAS_RESOURCE).filter(other).zip(replicas);
        }
        if let Some(sharing) = &gpu.mig_sharing {
            let units = number("shares of a MIG instance", Some(sharing.units), None, MAX_CLIENTS).unwrap_or(1);
            let named =
                sharing.resource_name.as_deref().and_then(|name| self.names.id_and_kind(name)).map(|(id, _)| id);
            class.instance_sharing = Some(InstanceSharing { units, resource: named });
        }
    }

    /// Reads the slices of the GPU. Returns why a slice is invalid. In this case, the GPU is not
    /// repartitioned.
    fn read_slices(&self, gpu: &Gpu, class: &mut GpuClass) -> Result<(), String> {
        // Report only one problem, the first in alphabetical order. The report must not depend on
        // the order of slices.
        let mut wrong: Option<String> = None;
        let mut reject = |reason: String| {
            wrong = Some(wrong.take().map_or(reason.clone(), |other| other.min(reason)));
        };
        let mut instances = Vec::new();
        for slice in &gpu.slices {
            let Some((resource, kind)) = self.names.id_and_kind(&slice.resource) else {
                reject(format!("the GPU has slices of {}, which is not a known resource", slice.resource));
                continue;
            };
            let of_mig = kind == ResourceKind::Mig
                || slice.resource.starts_with(device::MIG_PREFIX)
                || slice.placement.is_some();
            let mut instance = None;
            if of_mig {
                instance = Self::instance_of(slice, class);
                match instance {
                    Some(instance) => instances.push(instance),
                    None => reject(match slice.placement {
                        Some(place) => format!(
                            "the GPU has {} at memory slice {place}, where that profile cannot start",
                            slice.resource
                        ),
                        None => format!("the GPU has {} without a placement", slice.resource),
                    }),
                }
            }
            let cell = SliceCell { resource, kind, instance, count: slice.count };
            if slice.count > 0 {
                if slice.in_use { &mut class.in_use } else { &mut class.free }.push(cell);
            }
        }
        merge_cells(&mut class.in_use);
        merge_cells(&mut class.free);
        if class.in_use.iter().chain(&class.free).any(|cell| cell.count > MAX_EQUAL_SLICES) {
            reject(format!("the GPU has more than {MAX_EQUAL_SLICES} equal slices"));
        }
        instances.sort_unstable();
        let plain = class.in_use.iter().chain(&class.free).filter(|cell| cell.kind == ResourceKind::Mig);
        let doubled = plain.clone().any(|cell| cell.count > 1);
        instances.dedup();
        if let Some(shared) = &class.table
            && (doubled || shared.table.combined_mask(&instances).is_none())
        {
            reject("the GPU's MIG instances overlap, or exceed the number that it supports".to_owned());
        }
        if let Err(reason) = class.check_consistency() {
            reject(reason);
        }
        wrong.map_or(Ok(()), Err)
    }

    fn instance_of(slice: &SliceGroup, class: &GpuClass) -> Option<Instance> {
        let shared = class.table.as_ref()?;
        let start = u8::try_from(slice.placement?).ok()?;
        let name = match &slice.profile {
            Some(profile) => device::mig_resource(profile),
            None => slice.resource.strip_suffix(device::SHARED_SUFFIX).unwrap_or(&slice.resource).to_owned(),
        };
        let instance = Instance { profile: shared.table.profile(&name)?, start };
        shared.table.mask(instance).map(|_| instance)
    }
}
