//! A connection that stays open while data flows.

use std::{
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::ensure;
use integration::{Pod, TIMEOUT, connect, eventually, exchange, source_seen};

/// Data is sent and echoed continuously.
pub(crate) struct Flow {
    stop: Arc<AtomicBool>,
    words: Arc<AtomicU64>,
    broken: Arc<Mutex<Option<String>>>,
}

impl Flow {
    pub(crate) fn open(pod: &Pod, to: SocketAddr) -> anyhow::Result<Self> {
        let (_, stream) = source_seen(connect(&pod.netns, to)?)?;
        let flow = Self {
            stop: Arc::default(),
            words: Arc::default(),
            broken: Arc::default(),
        };
        let (stop, words) = (Arc::clone(&flow.stop), Arc::clone(&flow.words));
        let broken = Arc::clone(&flow.broken);
        thread::spawn(move || {
            let ended = talk(stream, &stop, &words).err();
            *broken.lock().unwrap_or_else(PoisonError::into_inner) =
                ended.map(|error| format!("{error:#}"));
        });
        Ok(flow)
    }

    pub(crate) fn goes_on(&self) -> anyhow::Result<()> {
        let before = self.words.load(Ordering::Relaxed);
        eventually("words come back", TIMEOUT, || {
            let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
            // A broken connection stays broken: do not wait.
            let now = self.words.load(Ordering::Relaxed);
            ensure!(broken.is_some() || now > before + 3, "none came back");
            anyhow::Ok(broken.clone())
        })?
        .map_or(Ok(()), |broken| Err(anyhow::anyhow!("it broke: {broken}")))
    }
}

fn talk(mut stream: TcpStream, stop: &AtomicBool, words: &AtomicU64) -> anyhow::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        exchange(&mut stream, "a word")?;
        words.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
