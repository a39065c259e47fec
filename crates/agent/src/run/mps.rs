//! Forwards changes of the MPS host's state to the main loop.
use tokio::sync::{mpsc, watch};

use super::input::Input;
use crate::mps::HostView;
use crate::mps::link::HostLink;

/// Watches the MPS host until the main loop has ended.
pub(super) async fn watch_mps_host(
    link: HostLink,
    sender: watch::Sender<HostView>,
    inputs: mpsc::Sender<Input>,
) -> anyhow::Result<()> {
    let mut views = sender.subscribe();
    let forward = async {
        while views.changed().await.is_ok() {
            let view = views.borrow_and_update().clone();
            if inputs.send(Input::Mps(view)).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        // Neither branch is ever restarted, so neither has to be cancel-safe.
        () = link.follow_mps_host(&sender) => {}
        () = forward => {}
    }
    Ok(())
}
