//! Groups nodes whose GPUs other software divides in the same way. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::sharingpolicy::{GpuSelector, MAX_REPLICAS, ThreadPolicy};
use cleave_plan::constraints::Labels;
use cleave_plan::mps::MAX_CLIENTS;

use super::input::{Input, MIG_LABEL, Node, PLUGIN_LABEL};
use super::report::{Notes, SettingPlace};
use super::sources::gke::{self, Pool};
use super::sources::hami::{HamiConfig, HamiResources, OperatingMode};
use super::sources::mig_parted::{MigRule, MigState};
use super::sources::nos::{self, Partitioning};
use super::sources::plugin::{GPU, MIG_PREFIX, MigStrategy, PluginConfig, SharedBy, Sharing};

/// The node label that policies for GKE node pools select. New pools do not have GKE's sharing
/// labels.
const POOL_LABEL: &str = "pool";
/// The label with which a policy selects a single node.
const HOSTNAME_LABEL: &str = "kubernetes.io/hostname";

/// Nodes whose GPUs other software divides in the same way.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NodeGroup {
    /// Name of the group's policies.
    pub(super) name: String,
    /// The nodes, as the report names them.
    pub(super) nodes: String,
    /// Current labels of the nodes. Pods use these labels to select nodes. Empty for nodes without
    /// a label.
    pub(super) labels: Labels,
    /// `nodeSelector` of the policies. Empty to select all nodes.
    pub(super) selector: Labels,
    /// How GPUs are divided. GPUs that no rule selects remain whole.
    pub(super) rules: Vec<DivisionRule>,
    /// The names of HAMi's resources, if HAMi manages the nodes.
    pub(super) hami: Option<HamiResources>,
}

/// How some of a node's GPUs are divided.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DivisionRule {
    /// The GPUs. `None` selects all GPUs that no other rule selects.
    pub(super) gpus: Option<GpuSelector>,
    /// How each GPU is divided.
    pub(super) division: Division,
    /// The resource that pods currently request for a whole GPU, or for a share or replica if GPUs
    /// are shared.
    pub(super) name: String,
    /// Whether the other software currently refuses requests for more than 1.
    pub(super) refuses_above_one: bool,
}

/// How a GPU is divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Division {
    /// Not divided.
    Whole,
    /// Equal shares or replicas of the GPU, and their number.
    Equal(SharedBy, u32),
    /// MIG instances. `None` if they are created on demand.
    Mig {
        /// The profiles of the instances.
        layout: Option<Vec<String>>,
        /// How each instance is shared, and the number of shares or replicas. `None` if instances
        /// are not shared.
        shared: Option<(SharedBy, u32)>,
        /// The current resources of the instances, by profile.
        names: BTreeMap<String, String>,
    },
    /// Sized slices, created on demand.
    Sizes,
    /// Sized slices, MIG instances and whole GPUs, created on demand.
    Auto(Option<ThreadPolicy>),
}

impl DivisionRule {
    fn for_all_gpus(division: Division) -> Self {
        Self { gpus: None, division, name: GPU.to_owned(), refuses_above_one: false }
    }
}

/// Returns the groups. The order of the groups depends only on the input.
pub(super) fn group_nodes(input: &Input, notes: &mut Notes) -> Vec<NodeGroup> {
    let mut groups = nvidia_groups(input, notes);
    groups.extend(nos_groups(input, notes));
    groups.extend(gke_groups(&input.pools, notes));
    groups.extend(input.hami.iter().flat_map(hami_groups));
    add_rules_for_whole_gpus(&mut groups);
    if let [only] = groups.as_mut_slice()
        && only.labels.is_empty()
    {
        only.nodes = "All nodes".to_owned();
    }
    groups
}

/// The names of a node group's configurations: first the plugin's, then mig-parted's.
type ConfigNames = (Option<String>, Option<String>);

fn nvidia_groups(input: &Input, notes: &mut Notes) -> Vec<NodeGroup> {
    if input.plugin.is_empty() && input.mig.is_empty() {
        return Vec::new();
    }
    let keys = if input.nodes.is_empty() {
        config_names_without_nodes(input, notes)
    } else {
        config_names_of_nodes(input, notes)
    };
    let groups: Vec<NodeGroup> = keys.into_iter().map(|key| nvidia_group(input, key, notes)).collect();
    let has_instances =
        groups.iter().flat_map(|group| &group.rules).any(|rule| matches!(rule.division, Division::Mig { .. }));
    let strategies = input.plugin.values().filter_map(|config| config.mig_strategy).chain(input.mig_strategy);
    if has_instances && strategies.count() == 0 {
        notes.decide(
            SettingPlace { source: "Nodes".to_owned(), setting: "migStrategy".to_owned(), value: String::new() },
            "The input does not specify how NVIDIA's plugin names instances. With single, the default of the GPU \
             Operator, \
             pods request nvidia.com/gpu, and have to request nvidia.com/mig-<profile> instead.",
        );
    }
    groups
}

/// Returns the combinations of configurations that the nodes' labels select.
fn config_names_of_nodes(input: &Input, notes: &mut Notes) -> BTreeSet<ConfigNames> {
    let mut missing = BTreeSet::new();
    let mut keys = BTreeSet::new();
    for node in input.nodes.iter().filter(|node| has_gpu(node) && !node.labels.contains_key(nos::PARTITIONING_LABEL)) {
        let mut named = |label: &'static str, exists: &dyn Fn(&str) -> bool| {
            let name = node.labels.get(label)?;
            if exists(name) {
                return Some(name.clone());
            }
            missing.insert((label, name.clone()));
            None
        };
        let plugin = named(PLUGIN_LABEL, &|name| input.plugin.contains_key(name));
        let mig = named(MIG_LABEL, &|name| input.mig.contains_key(name));
        // NVIDIA's plugin does not start on a node if the node's label names a configuration that
        // does not exist.
        if plugin.is_some() || input.plugin.is_empty() || !node.labels.contains_key(PLUGIN_LABEL) {
            keys.insert((plugin, mig));
        }
    }
    for (label, name) in missing {
        notes.decide(
            SettingPlace { source: "Nodes".to_owned(), setting: label.to_owned(), value: name },
            "The input contains no configuration of this name. Add the ConfigMap that contains it to the input.",
        );
    }
    keys
}

/// Returns whether a node has a label that identifies GPU nodes.
fn has_gpu(node: &Node) -> bool {
    let of_gpu = ["nvidia.com/", "feature.node.kubernetes.io/pci-10de", "feature.node.kubernetes.io/pci-0302_10de"];
    node.labels.keys().any(|label| of_gpu.iter().any(|start| label.starts_with(start)))
}

/// Returns the combinations that labels can select, if the input has no nodes.
fn config_names_without_nodes(input: &Input, notes: &mut Notes) -> BTreeSet<ConfigNames> {
    let mut keys = BTreeSet::new();
    if input.default_plugin.is_some() || input.default_mig.is_some() {
        keys.insert((None, None));
    }
    let others = input.plugin.keys().filter(|name| Some(*name) != input.default_plugin.as_ref());
    keys.extend(others.map(|name| (Some(name.clone()), None)));
    let others = input.mig.keys().filter(|name| Some(*name) != input.default_mig.as_ref());
    keys.extend(others.map(|name| (None, Some(name.clone()))));
    let (plugin, mig) = (keys.iter().any(|(plugin, _)| plugin.is_some()), keys.iter().any(|(_, mig)| mig.is_some()));
    if plugin && mig {
        notes.decide(
            SettingPlace::of_whole_source("Nodes"),
            format!(
                "The input has no nodes, so `cleave migrate` cannot find nodes with both {PLUGIN_LABEL} and {MIG_LABEL}. Of \
                 two policies that select such a node by one label each, the older one wins. Add the output of \
                 `kubectl get nodes -o yaml` to the input."
            ),
        );
    }
    keys
}

fn nvidia_group(input: &Input, (plugin, mig): ConfigNames, notes: &mut Notes) -> NodeGroup {
    let config_name = plugin.as_ref().or(input.default_plugin.as_ref());
    let empty = PluginConfig::default();
    let config = config_name.and_then(|name| input.plugin.get(name)).unwrap_or(&empty);
    let mig_rules = mig.as_ref().or(input.default_mig.as_ref()).and_then(|name| input.mig.get(name));
    let mut labels = Labels::new();
    labels.extend(plugin.clone().map(|name| (PLUGIN_LABEL.to_owned(), name)));
    labels.extend(mig.clone().map(|name| (MIG_LABEL.to_owned(), name)));
    let name = match (&plugin, &mig) {
        (Some(plugin), Some(mig)) => format!("{plugin}-mig-{mig}"),
        (Some(plugin), None) => plugin.clone(),
        (None, Some(mig)) => format!("mig-{mig}"),
        (None, None) => match config_name.map(String::as_str) {
            None | Some("") => "nvidia-gpus".to_owned(),
            Some(name) => name.to_owned(),
        },
    };
    let strategy = config.mig_strategy.or(input.mig_strategy);
    let source = group_name(&labels);
    let mut rules = Vec::new();
    for rule in mig_rules.into_iter().flatten() {
        rules.push(rule_for_mig_parted_entry(rule, config, strategy, &source, notes));
    }
    if let Some(sharing) = &config.sharing {
        let covered = rules.iter().any(|rule| rule.gpus.is_none());
        if let Some(&count) = sharing.replicas.get(GPU).filter(|_| !covered) {
            rules.push(rule_for_equal_division(None, sharing, count, &source, notes));
        }
        if mig_rules.is_none() {
            report_unknown_instances(sharing, &source, notes);
        }
    }
    NodeGroup { name, nodes: source, selector: labels.clone(), labels, rules, hami: None }
}

/// Returns the name that the report uses for the nodes with these labels.
fn group_name(labels: &Labels) -> String {
    if labels.is_empty() {
        return "Nodes without a label of another configuration".to_owned();
    }
    let labels: Vec<String> = labels.iter().map(|(label, value)| format!("{label}={value}")).collect();
    format!("Nodes {}", labels.join(","))
}

/// Reports replicas of MIG instances if the input does not specify which instances exist.
fn report_unknown_instances(sharing: &Sharing, source: &str, notes: &mut Notes) {
    for (resource, count) in sharing.replicas.iter().filter(|(resource, _)| resource.starts_with(MIG_PREFIX)) {
        let section = match sharing.by {
            SharedBy::TimeSlicing => format!("timeSlicing: {{replicas: {count}}}"),
            SharedBy::Mps => format!("mps: {{units: {count}}}"),
        };
        notes.decide(
            SettingPlace { source: source.to_owned(), setting: resource.clone(), value: count.to_string() },
            format!(
                "The input does not specify which GPUs have these instances. Add the configuration of mig-parted and \
                 the nodes to the input, or write a policy with mode: Mig, mig.layout and mig.sharing: {{{section}}}."
            ),
        );
    }
}

fn rule_for_equal_division(
    gpus: Option<GpuSelector>,
    sharing: &Sharing,
    count: u32,
    source: &str,
    notes: &mut Notes,
) -> DivisionRule {
    let count = limit_count(sharing.by, count, source, notes);
    DivisionRule {
        gpus,
        division: Division::Equal(sharing.by, count),
        name: sharing.served_resource(GPU),
        refuses_above_one: sharing.refuses_above_one,
    }
}

/// Returns `count`, reduced to the number of shares or replicas that Cleave can serve.
fn limit_count(by: SharedBy, count: u32, source: &str, notes: &mut Notes) -> u32 {
    let (most, what, why) = match by {
        SharedBy::TimeSlicing => (MAX_REPLICAS, "replicas", "each needs memory for its CUDA context"),
        SharedBy::Mps => (MAX_CLIENTS, "shares", "an MPS server accepts no more clients"),
    };
    if count > most {
        notes.decide(
            SettingPlace { source: source.to_owned(), setting: what.to_owned(), value: count.to_string() },
            format!("A GPU has at most {most} {what} in Cleave: {why}. The policy has {most}."),
        );
    }
    count.min(most)
}

/// Returns the division rule for an entry of mig-parted. The plugin's configuration determines how
/// instances are shared.
fn rule_for_mig_parted_entry(
    rule: &MigRule,
    config: &PluginConfig,
    strategy: Option<MigStrategy>,
    source: &str,
    notes: &mut Notes,
) -> DivisionRule {
    let selector = GpuSelector { models: rule.models.clone(), indices: rule.indices.clone(), ..GpuSelector::default() };
    let gpus = (selector != GpuSelector::default()).then_some(selector);
    let profiles: BTreeSet<&String> = match &rule.state {
        MigState::Off => {
            let count = config.sharing.as_ref().and_then(|sharing| Some((sharing, *sharing.replicas.get(GPU)?)));
            return match count {
                Some((sharing, count)) => rule_for_equal_division(gpus, sharing, count, source, notes),
                None => DivisionRule { gpus, ..DivisionRule::for_all_gpus(Division::Whole) },
            };
        }
        MigState::Empty => BTreeSet::new(),
        MigState::Layout(layout) => layout.iter().collect(),
    };
    let single = strategy == Some(MigStrategy::Single);
    if single && profiles.len() > 1 {
        notes.decide(
            SettingPlace { source: source.to_owned(), setting: "migStrategy".to_owned(), value: "single".to_owned() },
            "The instances have different profiles, which NVIDIA's plugin refuses with this strategy. Choose the \
             instance for each pod.",
        );
    }
    let base = |profile: &str| if single { GPU.to_owned() } else { cleave_api::names::mig_resource(profile) };
    let sharing = config.sharing.as_ref();
    let counts: BTreeSet<Option<u32>> = profiles
        .iter()
        .map(|profile| sharing.and_then(|sharing| sharing.replicas.get(&base(profile)).copied()))
        .collect();
    let shared = match (sharing, counts.iter().next()) {
        (Some(sharing), Some(Some(count))) if counts.len() == 1 => {
            Some((sharing.by, limit_count(sharing.by, *count, source, notes)))
        }
        (Some(_), _) if counts.len() > 1 => {
            notes.decide(
                SettingPlace { source: source.to_owned(), setting: "sharing".to_owned(), value: String::new() },
                "The instances of a GPU have different numbers of replicas. A policy shares all instances of a GPU in \
                 the same way, so this policy has no mig.sharing. Choose one number, or other layouts.",
            );
            None
        }
        _ => None,
    };
    let names = profiles
        .iter()
        .map(|profile| {
            let base = base(profile);
            let name = match (sharing, shared) {
                (Some(sharing), Some(_)) => sharing.served_resource(&base),
                _ => base,
            };
            ((*profile).clone(), name)
        })
        .collect();
    let layout = match &rule.state {
        MigState::Layout(layout) => Some(layout.clone()),
        _ => None,
    };
    let refuses_above_one = shared.is_some() && sharing.is_some_and(|sharing| sharing.refuses_above_one);
    DivisionRule { gpus, refuses_above_one, ..DivisionRule::for_all_gpus(Division::Mig { layout, shared, names }) }
}

fn nos_groups(input: &Input, notes: &mut Notes) -> Vec<NodeGroup> {
    let mut words: BTreeSet<String> =
        input.nodes.iter().filter_map(|node| node.labels.get(nos::PARTITIONING_LABEL)).cloned().collect();
    if words.is_empty() && input.nos.is_some() && input.nodes.is_empty() {
        words = [Partitioning::Mig, Partitioning::Mps].map(|one| one.label_value().to_owned()).into();
    }
    let mut groups = Vec::new();
    for word in words {
        let place = SettingPlace {
            source: "Nodes".to_owned(),
            setting: nos::PARTITIONING_LABEL.to_owned(),
            value: word.clone(),
        };
        let Some(partitioning) = Partitioning::parse(&word) else {
            notes.decide(
                place,
                "Nos accepts only mig, mps and hybrid. `cleave migrate` writes no policy for these nodes.",
            );
            continue;
        };
        let (division, text) = match partitioning {
            Partitioning::Mig => (
                Division::Mig { layout: None, shared: None, names: BTreeMap::new() },
                "The policy has mode Mig, which creates the instances that pods request.",
            ),
            Partitioning::Mps => {
                (Division::Sizes, "The policy creates the slices nvidia.com/gpu-<G>gb that pods request.")
            }
            Partitioning::Hybrid => {
                (Division::Auto(None), "Nos ignores nodes with the value hybrid. The policy has mode Auto.")
            }
        };
        notes.translated(place, text);
        let labels = Labels::from([(nos::PARTITIONING_LABEL.to_owned(), word)]);
        groups.push(NodeGroup {
            name: format!("nos-{}", partitioning.label_value()),
            nodes: group_name(&labels),
            selector: labels.clone(),
            labels,
            rules: vec![DivisionRule::for_all_gpus(division)],
            hami: None,
        });
    }
    groups
}

fn gke_groups(pools: &BTreeSet<Pool>, notes: &mut Notes) -> Vec<NodeGroup> {
    let mut groups = Vec::new();
    for pool in pools {
        notes.use_values_file("platforms/gke.yaml");
        let source = if pool.name.is_empty() { "Node pool".to_owned() } else { format!("Node pool {}", pool.name) };
        let selector = if pool.name.is_empty() {
            pool.labels
                .iter()
                .filter(|(label, _)| *label == gke::ACCELERATOR_LABEL)
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect()
        } else {
            Labels::from([(POOL_LABEL.to_owned(), pool.name.clone())])
        };
        let shared = pool.shared.map(|(strategy, count)| {
            let by = SharedBy::from(strategy);
            (by, limit_count(by, count, &source, notes))
        });
        let division = match (&pool.partition, shared) {
            (None, None) => None,
            (None, Some((by, count))) => Some(Division::Equal(by, count)),
            (Some(profile), shared) => {
                let layout = pool.instances.map(|count| vec![profile.clone(); count]);
                let names = BTreeMap::from([(profile.clone(), GPU.to_owned())]);
                Some(Division::Mig { layout, shared, names })
            }
        };
        if division.is_some() {
            let label = selector.iter().map(|(label, value)| format!("{label}={value}")).collect::<Vec<_>>().join(",");
            notes.decide(
                SettingPlace::of_whole_source(&source),
                format!(
                    "Create a new pool without GKE's sharing and partitions, with \
                     --node-labels={label},gke-no-default-nvidia-gpu-device-plugin=true and gpu-driver-version=disabled. \
                     The new pool has none of GKE's sharing labels: remove these labels from the node selectors of pods."
                ),
            );
        }
        let refuses_above_one = pool.shared.is_some_and(|(strategy, _)| strategy == gke::Strategy::TimeSharing);
        groups.push(NodeGroup {
            name: if pool.name.is_empty() { "gke-gpus".to_owned() } else { pool.name.clone() },
            nodes: source,
            labels: pool.labels.clone(),
            selector,
            rules: division
                .map(|division| DivisionRule { refuses_above_one, ..DivisionRule::for_all_gpus(division) })
                .into_iter()
                .collect(),
            hami: None,
        });
    }
    groups
}

fn hami_groups(config: &HamiConfig) -> Vec<NodeGroup> {
    let labels = config.node_selector.clone().unwrap_or_else(|| Labels::from([("gpu".to_owned(), "on".to_owned())]));
    let group = |name: String, labels: Labels, division| NodeGroup {
        name,
        nodes: group_name(&labels),
        selector: labels.clone(),
        labels,
        rules: vec![DivisionRule { name: config.names.count.clone(), ..DivisionRule::for_all_gpus(division) }],
        hami: Some(config.names.clone()),
    };
    let mut groups = vec![group("hami".to_owned(), labels.clone(), Division::Auto(config.threads))];
    for (node, _) in config.nodes.iter().filter(|(_, mode)| **mode == OperatingMode::Mig) {
        let mut labels = labels.clone();
        labels.insert(HOSTNAME_LABEL.to_owned(), node.clone());
        let division = Division::Mig { layout: None, shared: None, names: BTreeMap::new() };
        groups.push(group(format!("hami-{node}"), labels, division));
    }
    groups
}

/// Adds a rule that keeps GPUs whole to each group without a rule for all GPUs, if the policy of a
/// more general group would also select the group's nodes.
fn add_rules_for_whole_gpus(groups: &mut [NodeGroup]) {
    let general: Vec<Labels> =
        groups.iter().filter(|group| !group.rules.is_empty()).map(|group| group.selector.clone()).collect();
    for group in groups.iter_mut().filter(|group| group.rules.iter().all(|rule| rule.gpus.is_some())) {
        let is_more_general = |labels: &&Labels| {
            labels.len() < group.selector.len()
                && labels.iter().all(|(key, value)| group.selector.get(key) == Some(value))
        };
        if general.iter().any(|labels| is_more_general(&labels)) {
            group.rules.push(DivisionRule::for_all_gpus(Division::Whole));
        }
    }
}
