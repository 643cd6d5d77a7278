//! Computes the record of each change, and the files without inpod.

use std::path::Path;

use crate::{
    INPOD_CNI, ISTIO_CNI, NetworkFile, Plugin,
    plan::{Files, Plan, PlanError, Planner, Restore, is_istio_file, stem},
    record::{ChangedFile, Content},
};

impl Planner<'_> {
    /// Adds the reversal of all earlier changes to the wanted files. Without a wanted file, inpod leaves the directory.
    ///
    /// # Errors
    ///
    /// Fails if inpod's entry would stay in a file that is invalid, or behind a link.
    pub(crate) fn plan_for(&self, wanted: Files) -> Result<Plan, PlanError> {
        let changed = wanted.iter().map(|(name, content)| {
            let changed = self.changed_file(name, content.as_deref());
            (name.clone(), changed)
        });
        let changed = changed.collect();
        let owned = &self.desired.owned_file;
        let is_leaving = wanted.is_empty();
        let is_owned_left = !wanted.contains_key(owned) && self.record.files.contains_key(owned);
        // A file that no record names has inpod's entry if the record was lost. A meta plugin that copied the entry does
        // not remove the entry when inpod's file vanishes (Multus 4.2 then waits for the file).
        let is_left = |file: &&NetworkFile| is_leaving || (is_owned_left && file.is_meta());
        let mut files = wanted;
        for (name, known) in &self.record.files {
            let reverted = || self.reverted(name, known);
            files.entry(name.clone()).or_insert_with(reverted);
        }
        for file in self.directory.files.iter().filter(is_left) {
            let without_inpod = || self.without_inpod(file);
            files.entry(file.name.clone()).or_insert_with(without_inpod);
        }
        let plan = Plan {
            files,
            changed,
            joined: None,
        };
        self.check(&plan)?;
        Ok(plan)
    }

    fn check(&self, plan: &Plan) -> Result<(), PlanError> {
        for file in &self.directory.files {
            let name = &file.name;
            let Some(content) = plan.files.get(name) else {
                continue;
            };
            let known = self.record.files.get(name);
            if self.desired.is_own(name) || known.is_some_and(|known| known.own) {
                continue;
            }
            let is_changed = content.as_ref() != Some(&file.content);
            if file.is_link && is_changed {
                return Err(PlanError::Link(name.clone()));
            }
            if let Err(why) = &file.loaded
                && known.is_some_and(|known| known.ours.is_some() && !known.is_as_left(Some(file)))
            {
                let (file, why) = (name.clone(), why.clone());
                return Err(PlanError::Invalid { file, why });
            }
        }
        let owned = &self.desired.owned_file;
        let is_removed = plan.files.get(owned) == Some(&None);
        let calls_owned = |file: &&NetworkFile| {
            let called = file
                .list()
                .and_then(|list| list.called_file(self.conf_dir()));
            is_removed && called.as_ref() == Some(owned) && self.without_calls(file).is_none()
        };
        match self.directory.files.iter().find(calls_owned) {
            Some(file) => Err(PlanError::StillCalled {
                file: file.name.clone(),
                owned: owned.clone(),
            }),
            None => Ok(()),
        }
    }

    fn conf_dir(&self) -> &Path {
        &self.desired.runtime.conf_dir
    }

    /// Returns whether inpod made a list of a single configuration, and its owner has replaced or removed the list since.
    fn is_outdated(&self, name: &str, changed: &ChangedFile) -> bool {
        let list = format!("{}.conflist", stem(name));
        let made = self
            .record
            .files
            .get(&list)
            .filter(|made| made.ours.is_some());
        let is_made = |made: &ChangedFile| {
            made.before.is_none() && made.is_as_left(self.directory.file(&list))
        };
        changed.removed().is_some() && *name != list && made.is_some_and(|made| !is_made(made))
    }

    fn changed_file(&self, name: &str, content: Option<&[u8]>) -> ChangedFile {
        let (known, file) = (self.record.files.get(name), self.directory.file(name));
        let own = self.desired.is_own(name);
        let before = match (known, file) {
            _ if own => None,
            (Some(known), _) if known.is_as_left(file) => known.before.clone(),
            (_, Some(file)) => self.without_inpod(file).map(|text| text.as_slice().into()),
            (_, None) => None,
        };
        let mode = known.and_then(|known| known.mode);
        let mode = mode.or_else(|| file?.mode);
        let list = file.and_then(NetworkFile::list);
        let istio_entry = list.and_then(|list| list.plugin(ISTIO_CNI));
        ChangedFile {
            mode: mode.filter(|_| before.is_some()),
            before,
            own,
            ours: content.map(Content::from),
            istio_entry: istio_entry
                .map(|plugin| plugin.text.get().as_bytes().into())
                .or_else(|| known?.istio_entry.clone()),
        }
    }

    /// Returns the content without inpod's change: the content before the change, unless the owner has written since.
    fn reverted(&self, name: &str, changed: &ChangedFile) -> Option<Vec<u8>> {
        let content = match self.directory.file(name) {
            _ if changed.own => None,
            None if self.is_outdated(name, changed) => None,
            file if changed.is_as_left(file) => Some(changed.before.as_ref()?.bytes().to_owned()),
            file => self.without_inpod(file?),
        };
        let file = NetworkFile::new(name.to_owned(), content?);
        let list = file
            .list()
            .filter(|list| !list.is_single || is_istio_file(&file));
        match (self.restore, list) {
            (Restore::ExceptIstioCni, Some(_)) if is_istio_file(&file) => None,
            (Restore::ExceptIstioCni, Some(list)) => list.without(ISTIO_CNI),
            (Restore::WithIstioCni, Some(list)) if list.plugin(ISTIO_CNI).is_none() => {
                let text = changed.istio_entry.as_ref().map(Content::bytes);
                let text = text.and_then(|text| serde_json::from_slice(text).ok());
                match text.and_then(|text| Plugin::new(text).ok()) {
                    Some(entry) => Some(list.with(&entry, INPOD_CNI)),
                    None => Some(file.content),
                }
            }
            _ => Some(file.content),
        }
    }

    /// Returns the file without inpod's entry and without inpod in what a meta plugin calls, or `None` if nothing else
    /// is left.
    fn without_inpod(&self, file: &NetworkFile) -> Option<Vec<u8>> {
        if let Some(content) = self.without_calls(file) {
            return Some(content);
        }
        let list = file.list().filter(|list| list.plugin(INPOD_CNI).is_some());
        match list {
            None => Some(file.content.clone()),
            Some(_) if self.desired.is_own(&file.name) => None,
            Some(list) => list.without(INPOD_CNI),
        }
    }

    /// Returns the file of a meta plugin without inpod in what it calls, or `None` if there is nothing to change.
    pub(crate) fn without_calls(&self, file: &NetworkFile) -> Option<Vec<u8>> {
        let is_primary = |file: &&NetworkFile| {
            let is_foreign = !self.desired.is_own(&file.name) && !is_istio_file(file);
            is_foreign && file.list().is_some() && !file.is_meta()
        };
        let first = || Some(&self.directory.files.iter().find(is_primary)?.name);
        let primary = self.record.joined.as_ref().or_else(first);
        let own = self.conf_dir().join(&self.desired.owned_file);
        file.list()?
            .without_calls(&own, primary.map(String::as_str))
    }
}
