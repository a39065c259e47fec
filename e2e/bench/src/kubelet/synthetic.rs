//! A device plugin without hardware. It serves synthetic GPUs with the agent's choice of devices.
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Parser;
use cleave_agent::AgentArgs;
use cleave_agent::allocation::allocate::{ResourceView, choose_preferred, grant_allocation};
use cleave_agent::container_edits::ContainerSettings;
use cleave_agent::device_plugin::container_response;
use cleave_agent::gpu::layout::{Pool, PoolKind};
use cleave_kubelet::{
    ContainerResponse, Device, DeviceId, DeviceList, PluginOptions, PluginServer, PluginServerConfig, PreferredRequest,
    Refusal, Resource, ResourceName,
};
use futures::future::BoxFuture;
use tokio::sync::watch;

/// Memory of a synthetic GPU, in MiB.
const SYNTHETIC_GPU_MEMORY_MIB: u64 = 143_771;

/// Shares of synthetic GPUs, as an extended resource.
struct Shares {
    resource: String,
    pools: Vec<Pool>,
    devices: watch::Sender<Arc<DeviceList>>,
    settings: ContainerSettings,
    nodes: BTreeMap<String, Vec<String>>,
}

#[derive(Parser)]
struct AgentCommandLine {
    #[command(flatten)]
    args: AgentArgs,
}

impl Shares {
    fn new(resource: &str, gpus: u32, units: u32) -> Result<Self> {
        let kind = PoolKind::Mps {
            memory_mib: (1..=u64::from(units)).map(|k| SYNTHETIC_GPU_MEMORY_MIB * k / u64::from(units)).collect(),
            threads: (1..=units).map(|k| u8::try_from(100 * k / units)).collect::<Result<_, _>>()?,
            max_clients: None,
        };
        let pool = |gpu: u32| Pool {
            device: format!("GPU-00000000-0000-4000-8000-{gpu:012x}"),
            resource: resource.to_owned(),
            first: 0,
            count: units,
            kind: kind.clone(),
        };
        let pools: Vec<Pool> = (0..gpus).map(pool).collect();
        let ids = pools.iter().flat_map(Pool::ids);
        let devices: DeviceList =
            ids.map(|id| Ok(Device { id: DeviceId::parse(&id)?, healthy: true, numa: None })).collect::<Result<_>>()?;
        let agent = AgentCommandLine::try_parse_from(["agent", "--node-name", "bench"])?;
        Ok(Self {
            resource: resource.to_owned(),
            pools,
            devices: watch::Sender::new(Arc::new(devices)),
            settings: ContainerSettings::new(&agent.args),
            nodes: BTreeMap::new(),
        })
    }

    fn view(&self) -> ResourceView<'_> {
        ResourceView { resource: &self.resource, pools: &self.pools, reserved: &[] }
    }
}

impl Resource for Shares {
    fn devices(&self) -> watch::Receiver<Arc<DeviceList>> {
        self.devices.subscribe()
    }

    fn options(&self) -> PluginOptions {
        PluginOptions { pre_start: true, preferred: true }
    }

    fn preferred_devices<'a>(&'a self, request: PreferredRequest<'a>) -> BoxFuture<'a, Result<Vec<String>, Refusal>> {
        Box::pin(async move { Ok(choose_preferred(&self.view(), &(&request).into())) })
    }

    fn allocate<'a>(&'a self, ids: &'a [String]) -> BoxFuture<'a, Result<ContainerResponse, Refusal>> {
        Box::pin(async move {
            let allocation =
                grant_allocation(&self.view(), ids).map_err(|denied| Refusal::Invalid(denied.to_string()))?;
            Ok(container_response(self.settings.edits(&allocation, &self.nodes)))
        })
    }
}

/// Serves the shares in a device plugin directory until SIGTERM.
pub(super) async fn serve(directory: &Path, resource: &str, gpus: u32, units: u32) -> Result<()> {
    let shares: Arc<dyn Resource> = Arc::new(Shares::new(resource, gpus, units)?);
    let plugins = PluginServer::start(&PluginServerConfig::new(directory))?;
    plugins.set(BTreeMap::from([(ResourceName::parse(resource)?, shares)]));
    let terminate = tokio::signal::unix::SignalKind::terminate();
    tokio::signal::unix::signal(terminate).context("failed to wait for SIGTERM")?.recv().await;
    plugins.shutdown().await;
    Ok(())
}
